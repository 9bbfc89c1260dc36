"""Judges and reports whether recent online requests met their targets, and could have."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, NamedTuple

from sglang_coserve.core.control.latency_comparison import LatencyComparison, StreamStanding
from sglang_coserve.core.control.recent_values import SlicedValues
from sglang_coserve.core.control.slo import Latency, Slo, format_slo
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets, milliseconds, summarize

_LEAST_MISSES: Final = 5
"""Least number of values above the limit in the baseline for an SLO to count as infeasible; fewer
may be chance."""

_WARNING_INTERVAL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class SloStanding:
    """The state of one SLO, as measured and in the no-interference baseline; None where nothing is
    known."""

    slo: Slo
    limit_s: float
    values: int
    """How many were measured."""

    measured_s: float | None
    alone_s: float | None
    is_feasible: bool
    """False when online requests exceed the limit in the baseline, too, and not just by chance."""

    @property
    def is_met(self) -> bool:
        """True when the limit was not exceeded."""
        return self.measured_s is None or self.measured_s <= self.limit_s

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON, latencies in milliseconds."""
        return {
            "slo": format_slo(self.slo),
            "values": self.values,
            "measured_ms": milliseconds(self.measured_s),
            "online_alone_ms": milliseconds(self.alone_s),
            "limit_ms": milliseconds(self.limit_s) if self.limit_s < math.inf else None,
            "met": self.is_met,
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
    latencies: Mapping[str, LatencyComparison]
    """Latencies of all online requests by name: ttft, tpot, tbt and e2e."""

    streams: StreamStanding

    @property
    def reason(self) -> str | None:
        """Text that names the infeasible SLOs, their baseline value and a remedy; None if all are
        feasible."""
        missed = [
            f"{format_slo(standing.slo)!r} cannot be met, online requests alone reach "
            f"{milliseconds(standing.alone_s):.4g}ms"
            for standing in self.standings
            if not standing.is_feasible
        ]
        if not missed:
            return None
        return f"{'; '.join(missed)}; allow more, or send this server less online work"

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON, latencies in milliseconds."""
        reason = self.reason
        ttft_ms, tpot_ms = self.targets.in_ms()
        return {
            "targets": {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms},
            "requests": self.requests,
            "attainment": self.attainment,
            "attainment_online_alone": self.attainment_alone,
            "measured": [standing.to_dict() for standing in self.standings],
            "feasible": reason is None,
            "reason": reason,
            "latencies": {name: each.to_dict() for name, each in self.latencies.items()},
            "streams": self.streams.to_dict(),
        }


@dataclass(slots=True, eq=False)
class TokenTimes:
    """Times of a request's first and last token, and the number of its tokens."""

    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0

    def came(self, at_s: float) -> None:
        """Record one more token."""
        if not self.tokens:
            self.first_s = at_s
        self.last_s = at_s
        self.tokens += 1

    @property
    def tpot_s(self) -> float:
        """Mean gap in seconds; requires at least two tokens."""
        return (self.last_s - self.first_s) / (self.tokens - 1)


class _Latencies(NamedTuple):
    """Latencies of a request that has ended, in the engine or in the baseline, and whether its
    targets were met; None where undefined."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    is_met: bool | None = None


class _Ended(NamedTuple):
    """An online request that has ended."""

    at_s: float
    own_targets: SloTargets
    measured: _Latencies
    alone: _Latencies


_REQUEST_LATENCIES: Final = ("ttft", "tpot", "e2e")
"""Names of the latencies with one value for each request."""


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
        stream_slowdown: float | None = None,
        max_requests: int = 512,
        max_gaps: int = 8192,
        span_s: float = 600.0,
    ) -> None:
        """Start with an empty window of the last values, none older than ``span_s``.

        ``targets`` and ``slos`` judge requests without own targets.
        ``stream_slowdown`` is the promised pace of streams (``Objective``); None without a pace.
        """
        self._targets = targets
        self.slos: Final = tuple(slos)
        self._stream_limit = None if stream_slowdown is None else 1 + stream_slowdown
        self._span_s = span_s
        self._requests: deque[_Ended] = deque(maxlen=max_requests)
        self._judges_gaps = any(slo.latency is Latency.TBT for slo in slos)
        self._gaps: deque[tuple[float, float]] = deque(maxlen=max_gaps)
        self._gaps_alone: deque[tuple[float, float]] = deque(maxlen=max_gaps)
        """The last gaps that SLOs judge, each with its time."""

        self._all_gaps = SlicedValues(span_s)
        self._all_gaps_alone = SlicedValues(span_s)
        self._next_warning_s = -math.inf

    def gap(self, info: RequestInfo, last_token_s: float, at_s: float) -> None:
        """Record the gap before a token other than the first; none between tokens that came
        together."""
        gap_s = at_s - last_token_s
        if gap_s <= 0:
            return
        self._all_gaps.add(gap_s, at_s)
        if self._judges_gaps and info.tpot_target_s is None:
            self._gaps.append((at_s, gap_s))

    def gaps_alone(self, gap_s: float, at_s: float, count: int, *, has_target: bool) -> None:
        """Record gaps in the baseline that are equally long and ended together.

        ``has_target``: their requests have a TPOT target of their own.
        """
        self._all_gaps_alone.add(gap_s, at_s, count)
        if self._judges_gaps and not has_target:
            self._gaps_alone.extend([(at_s, gap_s)] * count)

    def finished(
        self, info: RequestInfo, measured: TokenTimes, alone: TokenTimes | None = None
    ) -> None:
        """Record an online request that delivered all its tokens. O(1).

        ``alone`` are their times in the baseline; None if unknown.
        """
        known = _Latencies() if alone is None else self._latencies(info, alone)
        self._add(info, measured.last_s, self._latencies(info, measured), known)

    def failed(self, info: RequestInfo, now_s: float, measured: TokenTimes) -> None:
        """Record an online request that was refused, shed or aborted by the server. O(1).

        It counts as a miss; the latencies of its tokens so far are included (``docs/metrics.md``).
        """
        found = self._latencies(info, measured)
        is_met = None if found.is_met is None else False
        self._add(info, now_s, found._replace(e2e_s=None, is_met=is_met), _Latencies())

    def report(self, now_s: float) -> SloReport:
        """Return the judgement of the requests in the window. O(window log window)."""
        since_s = now_s - self._span_s
        recent = [request for request in self._requests if request.at_s > since_s]
        standings = tuple(self._standing(slo, recent, since_s) for slo in self.slos)
        latencies = {
            name: LatencyComparison.of(_pairs(recent, f"{name}_s")) for name in _REQUEST_LATENCIES
        }
        latencies["tbt"] = LatencyComparison.within(self._all_gaps, self._all_gaps_alone, now_s)
        streams = [request for request in recent if request.own_targets.tpot_s is None]
        return SloReport(
            self._targets,
            len(recent),
            _share_met([request.measured for request in recent]),
            _share_met([request.alone for request in recent]),
            standings,
            latencies,
            StreamStanding.of(_pairs(streams, "tpot_s"), self._stream_limit),
        )

    def _standing(self, slo: Slo, recent: Sequence[_Ended], since_s: float) -> SloStanding:
        if slo.latency is Latency.TBT:
            values, values_alone = (
                [gap_s for at_s, gap_s in gaps if at_s > since_s]
                for gaps in (self._gaps, self._gaps_alone)
            )
        else:
            name = f"{slo.latency.value}_s"
            pairs = _pairs([one for one in recent if getattr(one.own_targets, name) is None], name)
            values = [here_s for here_s, _ in pairs if here_s is not None]
            values_alone = [alone_s for _, alone_s in pairs if alone_s is not None]
        alone_s = slo.statistic.of(summarize(values_alone))
        limit_s = slo.limit_over_value(alone_s)
        is_over = alone_s is not None and alone_s > limit_s
        misses = sum(value_s > limit_s for value_s in values_alone)
        return SloStanding(
            slo,
            limit_s,
            len(values),
            measured_s=slo.statistic.of(summarize(values)),
            alone_s=alone_s,
            is_feasible=not is_over or misses < _LEAST_MISSES,
        )

    def warning(self, now_s: float) -> str | None:
        """Return a warning if an SLO is infeasible.

        Checked once enough requests have ended, then once a minute; O(1) in between.
        """
        if now_s < self._next_warning_s or len(self._requests) < _LEAST_MISSES:
            return None
        self._next_warning_s = now_s + _WARNING_INTERVAL_S
        return self.report(now_s).reason

    def _add(self, info: RequestInfo, at_s: float, measured: _Latencies, alone: _Latencies) -> None:
        own_targets = SloTargets(info.ttft_target_s, info.tpot_target_s)
        self._requests.append(_Ended(at_s, own_targets, measured, alone))

    def _latencies(self, info: RequestInfo, times: TokenTimes) -> _Latencies:
        """Return the latencies of a request that has ended, and whether it met its targets."""
        assert info.is_online, f"{info.rid} is offline"
        targets = SloTargets(
            info.ttft_target_s or self._targets.ttft_s, info.tpot_target_s or self._targets.tpot_s
        )
        ttft_s = times.first_s - info.arrival_s if times.tokens else None
        tpot_s = times.tpot_s if times.tokens > 1 else None
        return _Latencies(
            ttft_s,
            tpot_s,
            times.last_s - info.arrival_s if times.tokens else None,
            None if targets == SloTargets() else targets.kept_by(ttft_s, tpot_s),
        )


def _pairs(requests: Sequence[_Ended], name: str) -> list[tuple[float | None, float | None]]:
    """Return a latency of each request, as measured and alone."""
    return list(map(attrgetter(f"measured.{name}", f"alone.{name}"), requests))


def _share_met(found: Sequence[_Latencies]) -> float | None:
    met = [one.is_met for one in found if one.is_met is not None]
    return sum(met) / len(met) if met else None
