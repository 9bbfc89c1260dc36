"""Which runs there are and in which order they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coserve_bench.slo import SloRule
from coserve_bench.systems import BASELINE, System

__all__ = ["RunKey", "plan_runs"]


@dataclass(frozen=True, slots=True, order=True)
class RunKey:
    """What tells one run from every other run of a benchmark."""

    repeat: int
    """From 1."""

    load: float
    """Online request rate over the capacity."""

    system: str
    slo: str = ""
    """Name of the rule whose targets the server was told; empty for a system that takes none."""

    offline_per_s: float | None = None
    """Rate of Poisson arrivals of offline requests; None keeps the server saturated."""

    @property
    def name(self) -> str:
        """A file name without its suffix."""
        parts = [f"repeat{self.repeat}", f"load{self.load:g}", self.system]
        parts += [self.slo] if self.slo else []
        parts += [f"offline{self.offline_per_s:.4g}"] if self.offline_per_s is not None else []
        return "_".join(parts)


def plan_runs(
    systems: Sequence[System], loads: Sequence[float], repeats: int, rules: Sequence[SloRule]
) -> list[RunKey]:
    """Return all runs in order: repeats, in each the systems, in each the loads.

    A system's loads stand together because they share a server. The order of
    the systems rotates from repeat to repeat, so that a drift of the machine
    favours none; the first repeat begins with the baseline, whose latencies
    are the other systems' targets.
    """
    baseline_first = sorted(systems, key=lambda system: system.name != BASELINE)
    runs = []
    for repeat in range(1, repeats + 1):
        turn = (repeat - 1) % len(baseline_first)
        for system in (*baseline_first[turn:], *baseline_first[:turn]):
            for load in loads:
                slos = [rule.name for rule in rules] if system.takes_slo else [""]
                runs += [RunKey(repeat, load, system.name, slo) for slo in slos]
    return runs
