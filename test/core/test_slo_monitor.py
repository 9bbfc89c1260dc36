"""What the monitor says, against the metrics of the requests in its window."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.control.slo import Latency, Slo, Statistic, parse_slo
from sglang_coserve.core.control.slo_monitor import SloMonitor, SloReport, TokenTimes
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import (
    Outcome,
    RequestTimeline,
    SloTargets,
    attainment,
    latency_report,
)

NO_TARGETS = SloTargets()
TARGETS = SloTargets(ttft_s=0.25, tpot_s=0.0625)


def measured_s(slo: Slo, timelines: list[RequestTimeline]) -> float | None:
    return slo.statistic.of(slo.latency.summary(latency_report(timelines)))


ALL_SLOS = tuple(
    Slo(latency, statistic, limit_s=limit_s)
    for latency, limit_s in ((Latency.TTFT, 0.25), (Latency.TPOT, 0.0625), (Latency.TBT, 0.0625))
    for statistic in Statistic
)


@dataclass(frozen=True)
class Served:
    """A request as it was served."""

    timeline: RequestTimeline
    targets: SloTargets
    alone: tuple[float, float] | None = None
    """When its first and last token would have come without offline work."""

    @property
    def info(self) -> RequestInfo:
        timeline, targets = self.timeline, self.targets
        return RequestInfo(
            timeline.rid,
            RequestClass.ONLINE,
            timeline.prompt_tokens,
            64,
            timeline.arrival_s,
            targets.ttft_s,
            targets.tpot_s,
        )

    def tell(self, monitor: SloMonitor, now_s: float) -> None:
        timeline, info = self.timeline, self.info
        times = timeline.token_times_s
        for last_s, token_s in pairwise(times):
            monitor.gap(info, last_s, token_s)
        if self.alone is not None:
            gap_s = (self.alone[1] - self.alone[0]) / (len(times) - 1)
            has_target = self.targets.tpot_s is not None
            monitor.gaps_alone(gap_s, now_s, len(times) - 1, has_target=has_target)
        measured = TokenTimes(times[0], times[-1], len(times)) if times else TokenTimes()
        if timeline.outcome is Outcome.FINISHED:
            alone = None if self.alone is None else TokenTimes(*self.alone, len(times))
            monitor.finished(info, measured, alone)
        else:
            monitor.failed(info, now_s, measured)


def served(
    ttft_s: float,
    tpot_s: float = 0.01,
    *,
    arrival_s: float = 0.0,
    targets: SloTargets = NO_TARGETS,
    alone: tuple[float, float] | None = None,
) -> Served:
    """``alone`` are TTFT and TPOT without offline work."""
    times = tuple(arrival_s + ttft_s + tpot_s * number for number in range(4))
    ends_alone = None
    if alone is not None:
        first_s = arrival_s + alone[0]
        ends_alone = (first_s, first_s + 3 * alone[1])
    return Served(RequestTimeline("r", arrival_s, times, 10), targets, ends_alone)


def tell_all(monitor: SloMonitor, *requests: Served) -> None:
    for request in requests:
        request.tell(monitor, request.timeline.token_times_s[-1])


# Multiples of 1/1024 s, so that sums and comparisons with targets are exact.
ticks = st.integers(0, 512).map(lambda count: count / 1024)
own_targets = st.sampled_from([None, None, 0.125, 0.5])


@st.composite
def requests_in_order_of_end(draw: st.DrawFn) -> list[tuple[float, Served]]:
    """Requests and when each ended."""
    requests = []
    for number in range(draw(st.integers(0, 12))):
        arrival_s = draw(ticks) * 40
        outcome = draw(st.sampled_from([Outcome.FINISHED, Outcome.FINISHED, Outcome.FAILED]))
        waits = draw(st.lists(ticks, min_size=outcome is Outcome.FINISHED, max_size=5))
        times = tuple(accumulate(waits, initial=arrival_s))[1:]
        end_s = times[-1] if outcome is Outcome.FINISHED else max((arrival_s, *times)) + draw(ticks)
        timeline = RequestTimeline(f"r{number}", arrival_s, times, 10, outcome=outcome)
        requests.append((end_s, Served(timeline, SloTargets(draw(own_targets), draw(own_targets)))))
    return sorted(requests, key=lambda ended: ended[0])


@given(
    ended=requests_in_order_of_end(),
    max_requests=st.integers(1, 12),
    span_s=st.sampled_from([2.0, 10.0, 100.0]),
    default=st.sampled_from([NO_TARGETS, TARGETS, SloTargets(ttft_s=0.25)]),
)
def test_the_window_is_measured_as_the_metrics_define(
    ended: list[tuple[float, Served]], max_requests: int, span_s: float, default: SloTargets
) -> None:
    slos = tuple(slo for slo in ALL_SLOS if slo.latency is not Latency.TBT)
    monitor = SloMonitor(default, slos, max_requests=max_requests, span_s=span_s)
    for end_s, request in ended:
        request.tell(monitor, end_s)
    now_s = ended[-1][0] if ended else 0.0
    report = monitor.report(now_s)

    window = [r for end_s, r in ended[-max_requests:] if end_s > now_s - span_s]
    assert report.requests == len(window)
    for standing in report.standings:
        latency = standing.slo.latency
        judged = [
            request.timeline
            for request in window
            if getattr(request.targets, f"{latency.value}_s") is None
        ]
        expected_s = measured_s(standing.slo, judged)
        limit_s = standing.slo.limit_s or math.inf
        assert standing.is_met == (expected_s is None or expected_s <= limit_s)
        assert standing.measured_s == pytest.approx(expected_s)
        assert standing.alone_s is None, "nothing is known of it"
    check_latencies(report, [request.timeline for request in window])

    promised = [
        (request.timeline, targets)
        for request in window
        if (
            targets := SloTargets(
                request.targets.ttft_s or default.ttft_s, request.targets.tpot_s or default.tpot_s
            )
        )
        != NO_TARGETS
    ]
    each = [attainment([timeline], targets) or 0.0 for timeline, targets in promised]
    assert report.attainment == (pytest.approx(sum(each) / len(each)) if each else None)
    assert report.attainment_alone is None


def check_latencies(report: SloReport, window: list[RequestTimeline]) -> None:
    """Compare with the metrics, for all requests: those with targets of their own, too."""
    expected = latency_report(window)
    for name in ("ttft", "tpot", "e2e"):
        found, summary = report.latencies[name], getattr(expected, name)
        assert found.values == summary.n
        assert found.alone_s is None
        assert found.ratio is None
        if summary.n:
            assert found.measured_s == pytest.approx((summary.p50_s, summary.p99_s))
        else:
            assert found.measured_s is None


@given(
    ended=requests_in_order_of_end(), max_gaps=st.integers(1, 40), span_s=st.sampled_from([2.0, 99])
)
def test_gaps_have_a_window_of_their_own(
    ended: list[tuple[float, Served]], max_gaps: int, span_s: float
) -> None:
    slos = tuple(slo for slo in ALL_SLOS if slo.latency is Latency.TBT)
    monitor = SloMonitor(TARGETS, slos, max_gaps=max_gaps, span_s=span_s)
    gaps: list[tuple[float, float]] = []
    for end_s, request in ended:
        request.tell(monitor, end_s)
        times = request.timeline.token_times_s
        if request.targets.tpot_s is None:
            gaps += [(earlier, later) for earlier, later in pairwise(times) if later > earlier]
    now_s = max((end_s for _, end_s in gaps), default=0.0)
    recent = [gap for gap in gaps[-max_gaps:] if gap[1] > now_s - span_s]
    pairs = [RequestTimeline("gap", a, (a, b), 1) for a, b in recent]
    for standing, slo in zip(monitor.report(now_s).standings, slos, strict=True):
        assert standing.measured_s == pytest.approx(measured_s(slo, pairs))


def test_every_latency_is_compared_whatever_slos_there_are() -> None:
    monitor = SloMonitor(NO_TARGETS, (parse_slo("ttft p99 <= +10%"),))
    tell_all(
        monitor,
        *(served(0.2, 0.02, arrival_s=n * 0.1, alone=(0.1, 0.01)) for n in range(50)),
        *(served(0.4, 0.04, arrival_s=n * 0.1, alone=(0.1, 0.01)) for n in range(50)),
    )
    found = monitor.report(9.0).latencies
    assert list(found) == ["ttft", "tpot", "e2e", "tbt"]
    for name, alone_s in (("ttft", 0.1), ("tpot", 0.01), ("e2e", 0.13)):
        compared = found[name]
        assert compared.values == 100
        assert compared.measured_s == pytest.approx((3 * alone_s, 4 * alone_s))
        assert compared.alone_s == pytest.approx((alone_s, alone_s))
        assert compared.ratio == pytest.approx((3.0, 4.0))
    gaps = found["tbt"]
    assert gaps.values == 300
    assert gaps.measured_s == pytest.approx((0.02, 0.04), rel=0.01)
    assert gaps.ratio == pytest.approx((2.0, 4.0), rel=0.02)


def test_a_ratio_is_of_requests_with_both_latencies() -> None:
    """The slow ones, which the baseline gave up, are measured, and in no ratio."""
    monitor = SloMonitor(NO_TARGETS)
    tell_all(monitor, *[served(0.2, alone=(0.1, 0.01))] * 5, *[served(9.0)] * 20)
    found = monitor.report(10.0).latencies["ttft"]
    assert (found.values, found.measured_s[0]) == (25, 9.0)
    assert found.ratio == pytest.approx((2.0, 2.0))


def test_gaps_of_a_busy_server_are_those_of_the_whole_window() -> None:
    """SLOs judge the last tenth; the first half is slow."""
    monitor = SloMonitor(NO_TARGETS, max_gaps=100)
    for number in range(1000):
        gap_s = 0.05 if number < 500 else 0.01
        monitor.gap(served(0.1).info, number * 0.5 - gap_s, number * 0.5)
    (gaps,) = (monitor.report(500.0).latencies["tbt"],)
    assert gaps.values == 1000
    assert gaps.measured_s.p99 == pytest.approx(0.05, rel=0.01)


def test_gaps_that_came_together_have_no_ratio() -> None:
    monitor = SloMonitor(NO_TARGETS)
    tell_all(monitor, served(0.2, 0.02, alone=(0.1, 0.0)))
    report = monitor.report(1.0)
    assert report.latencies["tbt"].ratio is None
    assert report.latencies["tpot"].ratio is None
    assert report.streams.streams == 0
    json.dumps(report.to_dict(), allow_nan=False)


def streams_of(*slowdowns: float, own_tpot_s: float | None = None) -> list[Served]:
    """Streams that take so many times as long as alone."""
    targets = SloTargets(tpot_s=own_tpot_s)
    return [
        served(0.1, 0.01 * slowdown, alone=(0.1, 0.01), targets=targets) for slowdown in slowdowns
    ]


def test_a_stream_is_judged_by_its_own_gaps_alone() -> None:
    """Most streams are three times as slow, and yet no P99 is: a few were stalled alone."""
    monitor = SloMonitor(NO_TARGETS, stream_slowdown=1.0)
    stalled = [served(0.1, 0.05, alone=(0.1, 0.05))] * 5
    tell_all(monitor, *streams_of(*[3.0] * 95), *stalled)
    report = monitor.report(2.0)
    assert report.latencies["tpot"].ratio.p99 == pytest.approx(1.0)
    assert report.streams.slowdown == pytest.approx((3.0, 3.0))
    assert report.streams.kept_share == pytest.approx(0.05)
    assert not report.streams.is_met


@pytest.mark.parametrize(("slow", "is_met"), [(0, True), (2, True), (3, False)])
def test_one_stream_in_a_hundred_may_be_slower_than_promised(slow: int, is_met: bool) -> None:
    monitor = SloMonitor(NO_TARGETS, stream_slowdown=0.5)
    tell_all(monitor, *streams_of(*[1.4] * (200 - slow), *[1.6] * slow))
    streams = monitor.report(2.0).streams
    assert (streams.limit, streams.streams, streams.is_met) == (1.5, 200, is_met)
    assert streams.kept_share == 1 - slow / 200


def test_without_a_pace_streams_are_shown_and_not_judged() -> None:
    monitor = SloMonitor(NO_TARGETS)
    tell_all(monitor, *streams_of(1.0, 3.0))
    streams = monitor.report(2.0).streams
    assert streams.slowdown.p50 == pytest.approx(2.0)
    assert (streams.limit, streams.kept_share, streams.is_met) == (None, None, True)


def test_streams_with_a_target_of_their_own_are_not_promised_a_pace() -> None:
    monitor = SloMonitor(NO_TARGETS, stream_slowdown=1.0)
    tell_all(monitor, *streams_of(5.0, 6.0, own_tpot_s=0.1), *streams_of(1.5))
    report = monitor.report(2.0)
    assert (report.streams.streams, report.streams.kept_share) == (1, 1.0)
    assert report.latencies["tpot"].values == 3


def test_what_offline_work_delayed_could_have_been_met() -> None:
    """Half of all time is offline work: the SLO is missed, but is not infeasible."""
    slos = (parse_slo("ttft p99 <= 300ms"), parse_slo("tpot mean <= 15ms"))
    monitor = SloMonitor(TARGETS, slos)
    tell_all(
        monitor,
        *(served(0.4, 0.02, arrival_s=n * 0.1, alone=(0.2, 0.01)) for n in range(20)),
    )
    report = monitor.report(2.0)
    assert [s.measured_s for s in report.standings] == pytest.approx([0.4, 0.02])
    assert [s.alone_s for s in report.standings] == pytest.approx([0.2, 0.01])
    assert not any(standing.is_met for standing in report.standings)
    assert report.reason is None
    assert (report.attainment, report.attainment_alone) == (0.0, 1.0)


def test_what_online_work_alone_misses_is_infeasible_and_the_reason_says_it_all() -> None:
    monitor = SloMonitor(TARGETS, (parse_slo("ttft p99 <= 300ms"), parse_slo("tpot mean <= 1s")))
    tell_all(monitor, *[served(0.45, alone=(0.45, 0.01))] * 10)
    report = monitor.report(1.0)
    assert [standing.is_feasible for standing in report.standings] == [False, True]
    assert report.reason == (
        "'ttft p99 <= 300ms' cannot be met, online requests alone reach 450ms; "
        "allow more, or send this server less online work"
    )


def test_a_few_slow_requests_prove_nothing() -> None:
    monitor = SloMonitor(TARGETS, (parse_slo("ttft p99 <= 300ms"),))
    tell_all(monitor, *[served(0.45, alone=(0.45, 0.01))] * 4)
    (standing,) = monitor.report(1.0).standings
    assert not standing.is_met
    assert standing.is_feasible


def test_a_warning_comes_at_once_then_once_a_minute_while_it_lasts() -> None:
    monitor = SloMonitor(TARGETS, (parse_slo("ttft p99 <= 300ms"),), span_s=150.0)
    for _ in range(5):
        assert monitor.warning(0.0) is None
        tell_all(monitor, served(0.45, alone=(0.45, 0.01)))
    warned_s = [now_s for now_s in range(400) if monitor.warning(float(now_s))]
    assert warned_s == [0, 60, 120]


def test_a_tolerance_is_over_what_requests_get_alone() -> None:
    monitor = SloMonitor(TARGETS, (parse_slo("ttft mean <= +10%"),))
    assert monitor.report(0.0).standings[0].is_met
    tell_all(monitor, served(0.12, alone=(0.1, 0.01)))
    (standing,) = monitor.report(1.0).standings
    assert standing.limit_s == pytest.approx(0.11)
    assert not standing.is_met
    assert standing.is_feasible


@pytest.mark.parametrize("requests", [[], [served(0.45, alone=(0.45, 0.01))] * 10])
def test_a_report_is_json(requests: list[Served]) -> None:
    monitor = SloMonitor(SloTargets(ttft_s=0.3), (parse_slo("ttft p99 <= 300ms"),))
    tell_all(monitor, *requests)
    values = json.loads(json.dumps(monitor.report(1.0).to_dict(), allow_nan=False))
    assert values["targets"] == {"ttft_ms": 300.0, "tpot_ms": None}
    assert values["feasible"] is not bool(requests)
    (standing,) = values["measured"]
    assert values["latencies"]["ttft"]["values"] == len(requests)
    assert values["latencies"]["e2e"]["measured_ms"].keys() == {"p50", "p99"}
    assert values["streams"]["streams"] == len(requests)
    assert standing["slo"] == "ttft p99 <= 300ms"
    assert standing["met"] is not bool(requests)
