"""The systems that the demo compares: ours and stock SGLang, on a CPU with the same kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sglang_coserve.local_server import LocalServer
from sglang_coserve.srt.cpu import defaults as cpu
from sglang_coserve.srt.start_defaults import is_emulated, model_path_in

__all__ = [
    "ALONE",
    "OURS",
    "STOCK",
    "DemoSystem",
    "has_gpu_pace",
    "make_server",
    "module_of",
    "stock_chunk_tokens",
]


@dataclass(frozen=True, slots=True)
class DemoSystem:
    """A server, and how both loads are sent to it."""

    name: str
    """In ``report.json``."""

    label: str
    is_ours: bool
    flags: tuple[str, ...] = ()
    has_offline: bool = True
    online_fields: Mapping[str, Any] = field(default_factory=dict)
    """Added to the body of every online request."""

    offline_fields: Mapping[str, Any] = field(default_factory=dict)
    """Added to the body of every offline line."""


_TUNED: Final = ("--enable-priority-scheduling", "--enable-mixed-chunk")

ALONE: Final = DemoSystem(
    "online_alone",
    "online alone",
    is_ours=False,
    flags=_TUNED,
    has_offline=False,
    online_fields={"priority": 100},
)
STOCK: Final = DemoSystem(
    "stock",
    "stock SGLang, tuned",
    is_ours=False,
    flags=_TUNED,
    # The larger number goes first; a difference above 10 preempts running requests.
    online_fields={"priority": 100},
    offline_fields={"priority": 0},
)
OURS: Final = DemoSystem("coserve", "sglang_coserve", is_ours=True)


def stock_chunk_tokens(*, on_gpu: bool) -> int:
    """Return the chunk size with which stock SGLang's P99 TTFT is best at our offline rate.

    With the demo's model on a CPU it is the best of 128 to 2,048 (tag ``measurements-1``), with
    Llama-3.1-8B on an emulated H100 better than 2,048.
    """
    return 512 if on_gpu else 256


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
