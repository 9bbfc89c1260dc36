"""The systems that are compared, and how the server of each is started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sglang_coserve.local_server import LocalServer
from sglang_coserve.metrics import SloTargets
from sglang_coserve.srt import cpu

__all__ = ["BASELINE", "SYSTEMS", "THROUGHPUT_BOUND", "ServerPlan", "System", "server_flags"]

_BENCHMARKS = Path(__file__).resolve().parent.parent
_OURS = "sglang_coserve.launch_server"
_STOCK = "sglang.launch_server"
_STOCK_ON_CPU = "stock_on_cpu"


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


SYSTEMS: Final[Mapping[str, System]] = {
    system.name: system
    for system in (
        _ours("online-only", "fifo", has_offline=False),
        System("stock-fcfs", is_ours=False),
        System(
            "stock-priority",
            is_ours=False,
            flags=("--enable-priority-scheduling",),
            # The larger number goes first; a difference above 10 preempts running requests.
            online_body={"priority": 100},
            offline_body={"priority": 0},
        ),
        _ours("non-preemptive", "non_preemptive", predicts=True),
        _ours("coserve", "coserve", predicts=True, takes_slo=True),
        _ours("conserve", "conserve", predicts=True, takes_slo=True),
        _ours("hygen", "hygen", predicts=True, takes_slo=True),
        _ours("bros", "bros", predicts=True, takes_slo=True),
        _ours("ooco", "ooco", predicts=True, takes_slo=True),
        _ours("fifo", "fifo"),
    )
}
"""Every system by name; a new contender is a new entry."""

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


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A server to start. Two runs with equal plans can share one."""

    system: System
    flags: tuple[str, ...]

    @property
    def module(self) -> str:
        """The Python module that is the server."""
        if self.system.is_ours:
            return _OURS
        return _STOCK if cpu.has_cuda() else _STOCK_ON_CPU

    def make(self, log_path: Path, ready_timeout_s: float) -> LocalServer:
        """Return the server, not started yet."""
        flags, environment = self.flags, dict(os.environ)
        if self.module == _STOCK_ON_CPU:
            # What our launcher defaults to on a CPU; a flag given later wins.
            flags = (*cpu.default_flags(), *flags)
            cpu.set_environment_defaults(environment)
            with cpu.divided_cores(1, environment):
                environment = dict(environment)
            paths = (str(_BENCHMARKS), environment.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return LocalServer(
            flags,
            module=self.module,
            log_path=log_path,
            ready_timeout_s=ready_timeout_s,
            extra_env=environment,
        )
