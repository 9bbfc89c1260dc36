"""How online requests stand against their targets: values, sentences, JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sglang_coserve.core.slo import SloResult, format_slo
from sglang_coserve.metrics import SloTargets

__all__ = ["SloReport", "SloStanding"]


@dataclass(frozen=True, slots=True)
class SloStanding:
    """How one SLO stands."""

    measured: SloResult
    alone: SloResult
    """The same in the baseline, without offline work."""

    is_feasible: bool
    """False when online requests alone exceed the limit, by more than chance."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON has them, latencies in milliseconds."""
        return {
            "slo": format_slo(self.measured.slo),
            "measured_ms": _ms(self.measured.measured_s),
            "online_alone_ms": _ms(self.alone.measured_s),
            "limit_ms": _ms(self.measured.limit_s) if self.measured.limit_s < math.inf else None,
            "met": self.measured.is_met,
            "feasible": self.is_feasible,
        }


@dataclass(frozen=True, slots=True)
class SloReport:
    """The online requests that ended within the window."""

    targets: SloTargets
    requests: int
    attainment: float | None
    """Share of requests within their targets, their own or the server's; those without any are
    not counted. None without such requests."""

    attainment_alone: float | None
    """The same in the baseline, without offline work; None where that is not known."""

    standings: tuple[SloStanding, ...]

    @property
    def infeasible(self) -> tuple[SloStanding, ...]:
        """The SLOs that online requests alone do not meet."""
        return tuple(standing for standing in self.standings if not standing.is_feasible)

    @property
    def reason(self) -> str | None:
        """Say which targets cannot be met, what is reached, and what to do; None: all can be."""
        if not self.infeasible:
            return None
        missed = "; ".join(
            f"{format_slo(alone.slo)!r} cannot be met, online requests alone reach "
            f"{_ms(alone.measured_s):.4g}ms"
            for alone in (standing.alone for standing in self.infeasible)
        )
        return f"{missed}; allow more, or send this server less online work"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, latencies in milliseconds."""
        return {
            "targets": {"ttft_ms": _ms(self.targets.ttft_s), "tpot_ms": _ms(self.targets.tpot_s)},
            "requests": self.requests,
            "attainment": self.attainment,
            "attainment_online_alone": self.attainment_alone,
            "measured": [standing.to_dict() for standing in self.standings],
            "feasible": not self.infeasible,
            "reason": self.reason,
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
