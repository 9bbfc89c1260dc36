"""Reports how recent online requests met their targets, as values, text and JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sglang_coserve.core.control.slo import SloResult, format_slo
from sglang_coserve.metrics import SloTargets

__all__ = ["SloReport", "SloStanding"]


@dataclass(frozen=True, slots=True)
class SloStanding:
    """The state of one SLO, as measured and in the baseline."""

    measured: SloResult
    alone: SloResult
    """The result in the no-interference baseline."""

    is_feasible: bool
    """False when online requests exceed the limit in the baseline, too, and not just by chance."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON, latencies in milliseconds."""
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
    """Statistics of the online requests that ended within the window."""

    targets: SloTargets
    requests: int
    attainment: float | None
    """Share of requests that met their targets (their own or the server's); requests without
    targets are not counted. None without such requests."""

    attainment_alone: float | None
    """The attainment in the no-interference baseline; None if unknown."""

    standings: tuple[SloStanding, ...]

    @property
    def infeasible(self) -> tuple[SloStanding, ...]:
        """The SLOs that are missed in the baseline, too."""
        return tuple(standing for standing in self.standings if not standing.is_feasible)

    @property
    def reason(self) -> str | None:
        """Text that names the infeasible SLOs, their baseline value and a remedy; None if all are
        feasible."""
        if not self.infeasible:
            return None
        missed = "; ".join(
            f"{format_slo(alone.slo)!r} cannot be met, online requests alone reach "
            f"{_ms(alone.measured_s):.4g}ms"
            for alone in (standing.alone for standing in self.infeasible)
        )
        return f"{missed}; allow more, or send this server less online work"

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON, latencies in milliseconds."""
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
