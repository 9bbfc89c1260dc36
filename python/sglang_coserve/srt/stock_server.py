"""Stock SGLang's server, with the same repairs of SGLang that ours has on its platform.

Run as a module; what ours is compared with. Nothing of co-serving takes part: on a CPU the
scheduler processes get our attention and page allocation, so that a comparison of the two servers
compares scheduling and not kernels.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler process; takes its arguments."""
    from sglang.srt.managers import scheduler

    from sglang_coserve.srt.optional_parts import platform_for

    platform_for(None).install_replacements()
    scheduler.run_scheduler_process(*args, **kwargs)


if __name__ == "__main__":
    from sglang_coserve.srt.start_defaults import (
        ANYWHERE,
        as_flags,
        model_path_in,
        set_up_platform,
    )

    # What ours starts with, before SGLang is first imported. A flag given wins.
    platform = set_up_platform(model_path_in(sys.argv[1:]))

    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    usual = {**ANYWHERE, **platform.flags}
    server_args = prepare_server_args([*as_flags(usual), *sys.argv[1:]])
    try:
        with platform.cores_for(server_args):
            launch_server(server_args, run_scheduler_process_func=run_scheduler_process)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
