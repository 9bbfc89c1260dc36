"""Servers that are compared: ours and stock SGLang, on a CPU with the same kernels and threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sglang_coserve.local_server import LocalServer
from sglang_coserve.srt.cpu import defaults as cpu

__all__ = ["make_server", "module_of"]


def module_of(*, is_ours: bool) -> str:
    """Return the Python module that is the server."""
    if is_ours:
        return "sglang_coserve.launch_server"
    return "sglang.launch_server" if cpu.has_cuda() else "sglang_coserve.srt.stock_server"


def make_server(
    flags: Sequence[str], *, is_ours: bool, log_path: Path, ready_timeout_s: float = 180.0
) -> LocalServer:
    """Return a server, not started yet; its flags win over what is usual on a CPU."""
    # On a busy machine SGLang's five seconds pass while the next request waits to be read.
    environment = {"SGLANG_TIMEOUT_KEEP_ALIVE": "600", **os.environ}
    if not is_ours and not cpu.has_cuda():
        # What our launcher defaults to on a CPU; a flag given later wins.
        flags = (*cpu.default_flags(), *flags)
        cpu.set_environment_defaults(environment)
        with cpu.divided_cores(1, environment):
            environment = dict(environment)
    return LocalServer(
        list(flags),
        module=module_of(is_ours=is_ours),
        log_path=log_path,
        ready_timeout_s=ready_timeout_s,
        extra_env=environment,
    )
