"""Judges and reports whether recent online requests met their targets, and could have."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_coserve.core.control.slo import Latency, Slo, SloResult, format_slo
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets, summarize

__all__ = ["SloMonitor", "SloReport", "TokenTimes"]


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


_LEAST_MISSES: Final = 5
"""Least number of values above the limit in the baseline for an SLO to count as infeasible; fewer
may be chance."""

_WARNING_INTERVAL_S: Final = 60.0

_Floats = NDArray[np.float64]


class TokenTimes(NamedTuple):
    """Times of a request's first and last token, and the number of its tokens."""

    first_s: float
    last_s: float
    tokens: int

    @property
    def tpot_s(self) -> float:
        """Mean gap in seconds; requires at least two tokens."""
        return (self.last_s - self.first_s) / (self.tokens - 1)


class SloMonitor:
    """Judges the online requests that ended lately against their targets.

    Latencies and attainment are defined as in ``metrics``. A request with its own target
    for TTFT or TPOT is not judged by the SLOs on that latency, but counts in
    the attainment by its own target. Each measured value is reported together with that of the
    no-interference baseline, as far as known (``Baseline``).

    No state is kept for requests that have not ended.
    """

    def __init__(
        self,
        targets: SloTargets,
        slos: Sequence[Slo] = (),
        *,
        max_requests: int = 512,
        max_gaps: int = 8192,
        span_s: float = 600.0,
    ) -> None:
        """Start with an empty window.

        Args:
            targets: targets of a request that has none of its own.
            slos: bounds on statistics of such requests.
            max_requests: number of recent requests to judge.
            max_gaps: number of recent gaps between tokens to judge, for SLOs on TBT.
            span_s: age in seconds from which values are ignored.
        """
        self._targets = targets
        self.slos: Final = tuple(slos)
        self._span_s = span_s
        self._requests = _Window(max_requests, width=6)
        self._gaps = _Window(max_gaps, width=1)
        self._gaps_alone = _Window(max_gaps, width=1)
        self._next_warning_s = -math.inf
        self.needs_gaps: Final = any(slo.latency is Latency.TBT for slo in slos)
        """True when an SLO bounds TBT, so that ``gap`` must be called."""

    def gap(self, info: RequestInfo, last_token_s: float, now_s: float) -> None:
        """Record the gap before an online request's token, other than its first. O(1)."""
        assert info.is_online, f"{info.rid} is offline"
        if info.tpot_target_s is None:
            self._gaps.add(now_s, now_s - last_token_s)

    def gap_alone(self, info: RequestInfo, last_token_s: float, at_s: float) -> None:
        """Record the gap before the same token in the baseline. O(1)."""
        if info.tpot_target_s is None:
            self._gaps_alone.add(at_s, at_s - last_token_s)

    def finished(
        self, info: RequestInfo, measured: TokenTimes, alone: TokenTimes | None = None
    ) -> None:
        """Record an online request that delivered all its tokens. O(1).

        Args:
            info: The request.
            measured: Its token times.
            alone: Its token times in the baseline; None if unknown.
        """
        self._ended(info, measured.last_s, measured, alone, is_finished=True)

    def failed(self, info: RequestInfo, now_s: float, measured: TokenTimes | None = None) -> None:
        """Record an online request that was refused, shed or aborted by the server. O(1).

        It counts as a miss; the latencies of its tokens so far are included (``docs/metrics.md``).
        """
        self._ended(info, now_s, measured, None, is_finished=False)

    def report(self, now_s: float) -> SloReport:
        """Return the judgement of the requests in the window. O(window log window)."""
        since_s = now_s - self._span_s
        ttft, ttft_alone, tpot, tpot_alone, met, met_alone = self._requests.since(since_s)
        (gaps,) = self._gaps.since(since_s)
        (gaps_alone,) = self._gaps_alone.since(since_s)
        measured = {Latency.TTFT: ttft, Latency.TPOT: tpot, Latency.TBT: gaps}
        alone = {Latency.TTFT: ttft_alone, Latency.TPOT: tpot_alone, Latency.TBT: gaps_alone}
        standings = []
        for slo in self.slos:
            alone_s = _statistic(slo, alone[slo.latency])
            limit_s = slo.limit_over_value(alone_s)
            alone_result = SloResult(slo, limit_s, alone_s)
            misses = int(np.count_nonzero(alone[slo.latency] > limit_s))
            standings.append(
                SloStanding(
                    measured=SloResult(slo, limit_s, _statistic(slo, measured[slo.latency])),
                    alone=alone_result,
                    is_feasible=alone_result.is_met or misses < _LEAST_MISSES,
                )
            )
        return SloReport(self._targets, len(met), _mean(met), _mean(met_alone), tuple(standings))

    def warning(self, now_s: float) -> str | None:
        """Return a warning if an SLO is infeasible; checked once a minute, O(1) in between."""
        if now_s < self._next_warning_s:
            return None
        self._next_warning_s = now_s + _WARNING_INTERVAL_S
        return self.report(now_s).reason

    def _ended(
        self,
        info: RequestInfo,
        now_s: float,
        measured: TokenTimes | None,
        alone: TokenTimes | None,
        *,
        is_finished: bool,
    ) -> None:
        assert info.is_online, f"{info.rid} is offline"
        targets = SloTargets(
            info.ttft_target_s or self._targets.ttft_s, info.tpot_target_s or self._targets.tpot_s
        )
        ttft_s, tpot_s = _latencies_s(info, measured)
        ttft_alone_s, tpot_alone_s = _latencies_s(info, alone)
        has_own_ttft, has_own_tpot = info.ttft_target_s is not None, info.tpot_target_s is not None
        self._requests.add(
            now_s,
            *((math.nan, math.nan) if has_own_ttft else (ttft_s, ttft_alone_s)),
            *((math.nan, math.nan) if has_own_tpot else (tpot_s, tpot_alone_s)),
            _is_met(targets, ttft_s, tpot_s, is_finished),
            math.nan if alone is None else _is_met(targets, ttft_alone_s, tpot_alone_s, True),
        )


def _latencies_s(info: RequestInfo, times: TokenTimes | None) -> tuple[float, float]:
    """Return TTFT and TPOT in seconds; NaN where undefined."""
    if times is None or times.tokens < 1:
        return math.nan, math.nan
    tpot_s = times.tpot_s if times.tokens > 1 else math.nan
    return times.first_s - info.arrival_s, tpot_s


class _Window:
    """A ring buffer of rows of ``width`` numbers, each with its time."""

    def __init__(self, capacity: int, width: int) -> None:
        self._capacity = capacity
        self._times_s, *self._columns = (array("d", bytes(8 * capacity)) for _ in range(1 + width))
        self._count = 0

    def add(self, now_s: float, *row: float) -> None:
        index = self._count % self._capacity
        self._times_s[index] = now_s
        for column, value in zip(self._columns, row, strict=False):
            column[index] = value
        self._count += 1

    def since(self, time_s: float) -> _Floats:
        """Return the columns of the rows added after ``time_s``; the order of rows is undefined."""
        count = min(self._count, self._capacity)
        columns = [np.frombuffer(column, count=count) for column in self._columns]
        return np.array(columns)[:, np.frombuffer(self._times_s, count=count) > time_s]


def _is_met(targets: SloTargets, ttft_s: float, tpot_s: float, is_finished: bool) -> float:
    """Return 1 if met, 0 if missed, NaN without targets (see ``SloTargets.met_by``)."""
    if targets == SloTargets():
        return math.nan
    # An undefined TTFT counts as a miss, an undefined TPOT does not.
    is_late = (targets.ttft_s is not None and not ttft_s <= targets.ttft_s) or (
        targets.tpot_s is not None and tpot_s > targets.tpot_s
    )
    return float(is_finished and not is_late)


def _statistic(slo: Slo, values_s: _Floats) -> float | None:
    return slo.statistic.of(summarize(values_s[~np.isnan(values_s)].tolist()))


def _mean(values: _Floats) -> float | None:
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if defined.size else None
