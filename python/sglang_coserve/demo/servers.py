"""Servers that are compared: ours and stock SGLang, on a CPU with the same kernels and threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sglang_coserve.local_server import LocalServer
from sglang_coserve.srt.cpu import defaults as cpu
from sglang_coserve.srt.start_defaults import is_emulated, model_path_in

__all__ = ["has_gpu_pace", "make_server", "module_of"]


def module_of(flags: Sequence[str], *, is_ours: bool) -> str:
    """Return the Python module that is the server."""
    if is_ours:
        return "sglang_coserve.launch_server"
    model_path = model_path_in(flags)
    on_gpu = cpu.has_cuda() and not (model_path and is_emulated(Path(model_path)))
    return "sglang.launch_server" if on_gpu else "sglang_coserve.srt.stock_server"


def has_gpu_pace(model: Path) -> bool:
    """Tell whether a model runs on a GPU, or takes the time of one."""
    return cpu.has_cuda() or is_emulated(model)


def make_server(
    flags: Sequence[str], *, is_ours: bool, log_path: Path, ready_timeout_s: float = 180.0
) -> LocalServer:
    """Return a server, not started yet; its flags win over what is usual on a CPU."""
    return LocalServer(
        list(flags),
        module=module_of(flags, is_ours=is_ours),
        log_path=log_path,
        ready_timeout_s=ready_timeout_s,
        # On a busy machine SGLang's five seconds pass while the next request waits to be read.
        extra_env={"SGLANG_TIMEOUT_KEEP_ALIVE": "600", **os.environ},
    )
