"""The systems that are compared, and the flags of their servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from common import stock
from sglang_coserve.metrics import SloTargets

__all__ = ["BASELINE", "SEARCHED", "SYSTEMS", "THROUGHPUT_BOUND", "System", "server_flags"]


@dataclass(frozen=True, slots=True)
class System:
    """One contender."""

    name: str
    is_ours: bool
    """Our server; else stock SGLang's."""

    flags: tuple[str, ...] = ()
    """Server flags beyond those that every system gets."""

    has_offline: bool = True
    """The offline load runs beside the online one."""

    takes_slo: bool = False
    """The server is told the targets."""

    predicts: bool = False
    """The server plans with a latency model, hence can use a profile."""

    online_body: Mapping[str, Any] = field(default_factory=dict)
    """Added to the body of every online request."""

    offline_body: Mapping[str, Any] = field(default_factory=dict)
    """Added to the body of every offline request."""


def _ours(name: str, policy: str, **more: Any) -> System:
    return System(name, is_ours=True, flags=("--offline-policy", policy), **more)


def _stock(name: str, settings: Mapping[str, Any], **more: Any) -> System:
    return System(name, is_ours=False, flags=stock.as_flags(settings), **more)


PRIORITIES: Final[Mapping[str, Any]] = {
    # The larger number goes first; a difference above 10 preempts running requests.
    "online_body": {"priority": 100},
    "offline_body": {"priority": 0},
}
SYSTEMS: Final[Mapping[str, System]] = {
    system.name: system
    for system in (
        _ours("online-only", "fifo", has_offline=False),
        _stock("stock-online-only", {}, has_offline=False),
        _stock("stock-fcfs", {}),
        _stock("stock-priority", {"enable_priority_scheduling": True}, **PRIORITIES),
        *(
            _stock(f"stock-tuned-{tokens}", stock.tuned(tokens), **PRIORITIES)
            for tokens in stock.CHUNK_TOKENS
        ),
        *(
            _stock(f"stock-interleaved-{tokens}", stock.interleaved(tokens), **PRIORITIES)
            for tokens in stock.CHUNK_TOKENS
        ),
        _ours("non-preemptive", "non_preemptive", predicts=True),
        System("defaults", is_ours=True, predicts=True),
        _ours("coserve", "coserve", predicts=True, takes_slo=True),
        _ours("conserve", "conserve", predicts=True, takes_slo=True),
        _ours("hygen", "hygen", predicts=True, takes_slo=True),
        _ours("bros", "bros", predicts=True, takes_slo=True),
        _ours("ooco", "ooco", predicts=True, takes_slo=True),
        _ours("fifo", "fifo"),
    )
}
"""Every system by name; a new contender is a new entry."""

SEARCHED: Final[Mapping[str, Sequence[str]]] = {
    kind: [name for name in SYSTEMS if name.startswith(f"{kind}-")]
    for kind in ("stock-tuned", "stock-interleaved")
}
"""Names that stand for several systems, of which the best one counts."""

BASELINE: Final = "online-only"
"""Latencies are divided by this system's."""

THROUGHPUT_BOUND: Final = "non-preemptive"
"""Offline throughput is divided by this system's."""


def server_flags(
    system: System,
    common: Sequence[str],
    targets: SloTargets | None,
    latency_profile: Path | None,
) -> tuple[str, ...]:
    """Return a system's whole command line; ``common`` goes to every system alike."""
    flags = [*common, *system.flags]
    if system.predicts and latency_profile is not None:
        flags += ["--latency-profile", str(latency_profile)]
    if system.takes_slo and targets is not None:
        for flag, target_s in (
            ("--slo-ttft-ms", targets.ttft_s),
            ("--slo-tpot-ms", targets.tpot_s),
        ):
            if target_s is not None:
                flags += [flag, f"{target_s * 1e3:.3f}"]
    return tuple(flags)
