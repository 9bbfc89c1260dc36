"""SLOs: targets for latency statistics such as P99 TTFT."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import LatencyReport, SloTargets, Summary


class Latency(Enum):
    """The latency that an SLO bounds."""

    TTFT = "ttft"
    TPOT = "tpot"
    """Mean time per output token of a request."""

    TBT = "tbt"
    """Time between two consecutive tokens (the papers' TBT, SGLang's ITL)."""

    def summary(self, report: LatencyReport) -> Summary:
        """Return the measured distribution of this latency."""
        return {Latency.TTFT: report.ttft, Latency.TPOT: report.tpot, Latency.TBT: report.itl}[self]


class Statistic(Enum):
    """The statistic of the distribution that an SLO bounds."""

    MEAN = "mean"
    P50 = "p50"
    P90 = "p90"
    P99 = "p99"

    def of(self, summary: Summary) -> float | None:
        """Return the statistic in seconds, or ``None`` without measurements."""
        value: float | None = getattr(summary, f"{self.value}_s")
        return value


@dataclass(frozen=True, slots=True)
class Slo:
    """One SLO, ``latency statistic <= limit``.

    The limit is either absolute, or a tolerance over the latency of online requests alone:
    0.1 allows 10% more (HyGen §5.2).
    """

    latency: Latency
    statistic: Statistic
    limit_s: float | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        assert (self.limit_s is None) != (self.tolerance is None), "one of limit and tolerance"

    def measured_s(self, report: LatencyReport) -> float | None:
        """Return the statistic in seconds, or ``None`` without measurements."""
        return self.statistic.of(self.latency.summary(report))

    def limit_over(self, online_only: LatencyReport | None) -> float:
        """Return the limit in seconds.

        Raises:
            ConfigError: the SLO is a tolerance, and there is no measurement to relate it to.
        """
        if self.limit_s is not None:
            return self.limit_s
        alone_s = None if online_only is None else self.measured_s(online_only)
        if alone_s is None:
            raise ConfigError(
                f"SLO {format_slo(self)!r} is relative to online requests alone, of which no "
                f"{self.latency.value} was measured: measure them first, or give an absolute limit"
            )
        return self.limit_over_value(alone_s)

    def limit_over_value(self, alone_s: float | None) -> float:
        """Return the limit in seconds, given the statistic of online requests alone.

        Infinite for a tolerance if that statistic is None.
        """
        if self.limit_s is not None:
            return self.limit_s
        assert self.tolerance is not None
        return math.inf if alone_s is None else alone_s * (1 + self.tolerance)


_UNITS_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SLO: Final = re.compile(
    r"(?P<latency>[a-z]+)[ _-](?P<statistic>[a-z]+\d*)\s*(?:<=|=|\s)\s*"
    r"(?P<sign>\+)?(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>us|ms|s|%)"
)


def parse_slo(text: str) -> Slo:
    """Parse ``"tbt p99 <= 100ms"`` or, as a tolerance over online-only, ``"tbt mean <= +10%"``.

    Raises:
        ConfigError: the text has another form; the message shows the valid ones.
    """
    match = _SLO.fullmatch(text.strip().lower())
    try:
        if match is None:
            raise ValueError("it has another form")
        latency, statistic = Latency(match["latency"]), Statistic(match["statistic"])
        number, unit = float(match["number"]), match["unit"]
        if (unit == "%") != bool(match["sign"]):
            raise ValueError("a tolerance has both a plus and a percent sign, a limit neither")
        if unit == "%":
            return Slo(latency, statistic, tolerance=number / 100)
        if number == 0:
            raise ValueError("no latency is 0")
        return Slo(latency, statistic, limit_s=number * _UNITS_S[unit])
    except ValueError as error:
        names = "|".join(latency.value for latency in Latency)
        statistics = "|".join(statistic.value for statistic in Statistic)
        raise ConfigError(
            f"SLO {text!r} cannot be read: {error}; write '({names}) ({statistics}) <= 100ms', "
            "or '<= +10%' for a tolerance over online requests alone"
        ) from error


def format_slo(slo: Slo) -> str:
    """Return the text of an SLO, such that ``parse_slo`` returns an equal SLO."""
    if slo.tolerance is not None:
        limit = f"+{slo.tolerance * 100:.10g}%"
    else:
        assert slo.limit_s is not None
        limit = f"{slo.limit_s * 1000:.10g}ms"
    return f"{slo.latency.value} {slo.statistic.value} <= {limit}"


def deadlines(targets: SloTargets) -> tuple[Slo, ...]:
    """Return per-request targets as SLOs on P99."""
    limits_s = ((Latency.TTFT, targets.ttft_s), (Latency.TPOT, targets.tpot_s))
    return tuple(
        Slo(latency, Statistic.P99, limit_s=limit_s)
        for latency, limit_s in limits_s
        if limit_s is not None
    )


def request_targets(slos: Sequence[Slo], online_only: LatencyReport | None = None) -> SloTargets:
    """Return the per-request targets to schedule by: the least TTFT and TPOT or TBT limits.

    If every request meets them, every statistic does, so this is conservative; a budget
    search then finds how much can be relaxed.

    Raises:
        ConfigError: an SLO is a tolerance, and ``online_only`` has no measurement for it.
    """
    limits_s = [(slo.latency is Latency.TTFT, slo.limit_over(online_only)) for slo in slos]
    return SloTargets(
        min([limit_s for is_ttft, limit_s in limits_s if is_ttft], default=None),
        min([limit_s for is_ttft, limit_s in limits_s if not is_ttft], default=None),
    )
