"""The systems that are compared: ours and stock SGLang, on a CPU with the same kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from sglang_coserve.local_server import LocalServer
from sglang_coserve.metrics import SloTargets
from sglang_coserve.srt.optional_parts import platform_for
from sglang_coserve.srt.start_defaults import model_path_in


@dataclass(frozen=True, slots=True)
class System:
    """A server that is measured, and how both loads are marked."""

    name: str
    is_ours: bool
    """Our server; else stock SGLang's."""

    flags: tuple[str, ...] = ()
    """Server flags beyond those that every system gets."""

    has_offline: bool = True
    """The offline load runs beside the online one."""

    takes_slo: bool = False
    """The server is told the targets."""

    is_searched: bool = False
    """Stands for many settings of stock SGLang, of which the best one counts."""

    online_body: Mapping[str, Any] = field(default_factory=dict)
    """Added to the body of every online request."""

    offline_body: Mapping[str, Any] = field(default_factory=dict)
    """Added to the body of every offline request: its mark."""

    def server_flags(self, targets: SloTargets) -> tuple[str, ...]:
        """Return the system's own part of the server's command line."""
        given = (("--slo-ttft-ms", targets.ttft_s), ("--slo-tpot-ms", targets.tpot_s))
        words = [
            word
            for flag, target_s in given
            if self.takes_slo and target_s is not None
            for word in (flag, f"{target_s * 1e3:.3f}")
        ]
        return (*words, *self.flags)


PRIORITIES: Final[Mapping[str, Any]] = {
    # The larger number goes first; a difference above 10 preempts running requests.
    "online_body": {"priority": 100},
    "offline_body": {"priority": 0},
}

_TUNED: Final = ("--enable-priority-scheduling", "--enable-mixed-chunk")

STOCK: Final = System("stock", is_ours=False, flags=_TUNED, **PRIORITIES)
ALONE: Final = replace(STOCK, name="online_alone", has_offline=False)
OURS: Final = System("coserve", is_ours=True, takes_slo=True, offline_body={"service_tier": "flex"})
LABELS: Final = {
    ALONE.name: "online alone",
    STOCK.name: "stock SGLang, tuned",
    OURS.name: "sglang_coserve",
}


def stock_chunk_tokens(model: Path) -> int:
    """Return the chunk size with which stock SGLang's P99 TTFT is best at our offline rate.

    With the demo's model on a CPU it is the best of 128 to 2,048 (tag ``measurements-1``), with
    Llama-3.1-8B on an emulated H100 better than 2,048.
    """
    platform = platform_for(model)
    return 256 if platform.on_cpu and platform.emulated is None else 512


def module_of(flags: Sequence[str], *, is_ours: bool) -> str:
    """Return the Python module that is the server."""
    if is_ours:
        return "sglang_coserve.launch_server"
    model_path = model_path_in(flags)
    platform = platform_for(Path(model_path) if model_path else None)
    return "sglang_coserve.srt.stock_server" if platform.on_cpu else "sglang.launch_server"


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
