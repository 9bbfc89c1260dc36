"""Stock SGLang's server on a CPU, with the same repairs of SGLang that ours has.

Run as a module; what ours is compared with. Nothing of co-serving takes part: the scheduler
processes get the attention and the page allocation of ``sglang_coserve.srt.cpu``, so that a
comparison of the two servers compares scheduling and not kernels.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler process; takes its arguments."""
    from sglang.srt.managers import scheduler

    from sglang_coserve.srt.cpu.replacements import install_replacements

    install_replacements()
    scheduler.run_scheduler_process(*args, **kwargs)


if __name__ == "__main__":
    from sglang_coserve.srt.cpu.defaults import cores_for
    from sglang_coserve.srt.start_defaults import as_flags, model_path_in, start_defaults

    # What ours starts with, before SGLang is first imported. A flag given wins.
    defaults = start_defaults(model_path_in(sys.argv[1:]))

    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args([*as_flags(defaults.flags), *sys.argv[1:]])
    try:
        with cores_for(server_args):
            launch_server(server_args, run_scheduler_process_func=run_scheduler_process)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
