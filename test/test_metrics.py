"""Each metric on timelines small enough to check by hand, and against its definition."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.metrics import (
    Outcome,
    RequestTimeline,
    SloTargets,
    Summary,
    Throughput,
    attainment,
    goodput_per_s,
    latency_report,
    summarize,
    throughput,
    token_attainment,
)


def request(
    arrival_s: float, *token_times_s: float, outcome: Outcome = Outcome.FINISHED
) -> RequestTimeline:
    return RequestTimeline("r", arrival_s, token_times_s, prompt_tokens=10, outcome=outcome)


FAILED, UNFINISHED = Outcome.FAILED, Outcome.UNFINISHED

latencies = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


@st.composite
def timelines(draw: st.DrawFn) -> RequestTimeline:
    # Eighths of a second: exact sums, and times that coincide with each other and with bounds.
    times = sorted(t / 8 for t in draw(st.lists(st.integers(0, 400), min_size=1, max_size=20)))
    prompt_tokens = draw(st.integers(0, 5000))
    return RequestTimeline(
        rid="r",
        arrival_s=times[0],
        token_times_s=tuple(times[1:]),
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=draw(st.integers(0, prompt_tokens)),
        outcome=draw(st.sampled_from(Outcome)),
    )


class TestOneRequest:
    @pytest.mark.parametrize(
        ("timeline", "ttft_s", "itls_s", "tpot_s", "e2e_s", "normalized_s"),
        [
            (request(1.0, 1.5, 1.75, 2.0, 3.0), 0.5, (0.25, 0.25, 1.0), 0.5, 2.0, 0.5),
            # Three tokens came together: a user waits once.
            (request(0.0, 1.0, 1.0, 1.0, 4.0), 1.0, (3.0,), 1.0, 4.0, 1.0),
            (request(1.0, 3.0), 2.0, (), None, 2.0, 2.0),
            (request(1.0), None, (), None, None, None),
            (request(0.0, 1.0, 2.0, outcome=FAILED), 1.0, (1.0,), 1.0, None, None),
            (request(0.0, 1.0, 2.0, outcome=UNFINISHED), 1.0, (1.0,), 1.0, None, None),
        ],
    )
    def test_every_latency(self, timeline, ttft_s, itls_s, tpot_s, e2e_s, normalized_s):
        assert timeline.ttft_s == ttft_s
        assert timeline.itls_s == itls_s
        assert timeline.tpot_s == tpot_s
        assert timeline.e2e_s == e2e_s
        assert timeline.normalized_latency_s == normalized_s

    @pytest.mark.parametrize("times", [(2.0, 1.0), (0.5,)])
    def test_time_does_not_run_backwards(self, times):
        with pytest.raises(AssertionError, match="not in order"):
            request(1.0, *times)

    def test_more_cached_than_prompt_is_refused(self):
        with pytest.raises(AssertionError, match="cached"):
            RequestTimeline("r", 0.0, (), prompt_tokens=3, cached_prompt_tokens=4)

    @given(timelines())
    def test_parts_add_up_to_the_whole(self, r):
        if r.e2e_s is None:
            return
        assert r.ttft_s + sum(r.itls_s) == pytest.approx(r.e2e_s, abs=1e-6)
        assert r.ttft_s + (r.tpot_s or 0.0) * (r.output_tokens - 1) == pytest.approx(
            r.e2e_s, abs=1e-6
        )


class TestSummaries:
    @given(latencies)
    def test_percentiles_are_linear_between_order_statistics(self, values):
        s, ordered = summarize(values), sorted(values)
        assert s.n == len(values)
        for q, found in ((50, s.p50_s), (90, s.p90_s), (99, s.p99_s), (100, s.max_s)):
            position = (len(ordered) - 1) * q / 100
            below, above = ordered[math.floor(position)], ordered[math.ceil(position)]
            expected = below + (position - math.floor(position)) * (above - below)
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert s.mean_s == pytest.approx(math.fsum(values) / len(values))

    @pytest.mark.parametrize(
        ("values_s", "expected"),
        [
            ([None, 0.25, None, 0.75], (2, 500.0, 500.0, 700.0, 745.0, 750.0)),
            ([], (0, None, None, None, None, None)),
            ([None], (0, None, None, None, None, None)),
        ],
    )
    def test_dict_is_of_what_is_defined_in_milliseconds(self, values_s, expected):
        names = ("n", "mean", "p50", "p90", "p99", "max")
        assert summarize(values_s).to_dict() == dict(zip(names, expected, strict=True))


class TestLatencyReport:
    def test_failed_requests_keep_their_tokens_but_have_no_end(self):
        report = latency_report(
            [request(0.0, 1.0, 3.0), request(0.0, 3.0, 4.0, 5.0, outcome=FAILED), request(0.0)]
        )
        assert (report.n, report.finished) == (3, 2)
        assert (report.ttft.n, report.ttft.mean_s) == (2, 2.0)
        assert (report.tpot.n, report.tpot.mean_s) == (2, 1.5)
        assert (report.itl.n, report.itl.mean_s) == (3, pytest.approx(4 / 3))
        assert (report.e2e.n, report.e2e.mean_s) == (1, 3.0)
        assert report.normalized.mean_s == 1.5

    def test_json_has_the_unit_in_every_key(self):
        data = json.loads(json.dumps(latency_report([request(0.0, 0.5)]).to_dict()))
        assert data["ttft_ms"]["p99"] == 500.0
        assert data["tpot_ms"] == Summary(0).to_dict()
        assert list(data) == [
            "n", "finished", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "normalized_ms"
        ]  # fmt: skip


SLO = SloTargets(ttft_s=1.0, tpot_s=0.5)


def test_targets_in_milliseconds_are_those_that_were_given() -> None:
    assert SloTargets.of_ms(300.0, None).in_ms() == (300.0, None)
    assert SLO.in_ms() == (1000.0, 500.0)


class TestAttainment:
    @pytest.mark.parametrize(
        ("timeline", "met"),
        [
            (request(0.0, 1.0, 1.5, 2.0), True),  # both exactly on target
            (request(0.0, 1.01, 1.5), False),  # first token late
            (request(0.0, 0.5, 1.5), False),  # later tokens slow
            (request(0.0, 0.5, 0.6, 1.5), True),  # one slow gap, mean within target
            (request(0.0, 1.0), True),  # a single token has no TPOT to miss
            (request(0.0), False),  # promised a first token, gave none
            (request(0.0, 0.5, 0.6, outcome=FAILED), False),
            (request(0.0, 0.5, 0.6, outcome=UNFINISHED), False),
        ],
    )
    def test_one_request(self, timeline, met):
        assert SLO.met_by(timeline) is met
        assert attainment([timeline], SLO) == met

    def test_attainment_is_a_share(self):
        group = [request(0.0, 1.0)] * 97 + [request(0.0, 2.0)] * 3
        assert attainment(group, SLO) == 0.97

    def test_nothing_to_attain(self):
        assert attainment([], SLO) is token_attainment([], SLO) is None

    def test_tokens_are_judged_one_by_one(self):
        group = [request(0.0, 0.9, 1.0, 2.0), request(0.0, 1.5, 1.6)]
        assert token_attainment(group, SLO) == 3 / 5
        assert token_attainment(group, SloTargets(ttft_s=1.0)) == 1 / 2
        assert token_attainment(group, SloTargets(tpot_s=0.5)) == 2 / 3
        assert token_attainment(group, SloTargets()) is None

    def test_a_token_never_delivered_is_late(self):
        assert token_attainment([request(0.0, outcome=FAILED)], SLO) == 0.0
        assert token_attainment([request(0.0, 0.5, outcome=UNFINISHED)], SLO) == 0.5
        # The one it owes is a later token, for which nothing is promised.
        assert token_attainment([request(0.0, 0.5, outcome=FAILED)], SloTargets(1.0)) == 1.0

    @given(st.lists(timelines(), min_size=1), st.floats(0, 50), st.floats(0, 50))
    def test_looser_targets_never_attain_less(self, group, ttft_s, tpot_s):
        tight, loose = SloTargets(ttft_s, tpot_s), SloTargets(ttft_s * 2, tpot_s + 1)
        assert attainment(group, tight) <= attainment(group, loose)
        by_token = token_attainment(group, tight)
        assert by_token is None or by_token <= token_attainment(group, loose)


class TestThroughput:
    def test_every_kind_of_token(self):
        r = RequestTimeline("r", 0.0, (1.0, 2.0, 3.0, 4.0), 100, cached_prompt_tokens=60)
        assert throughput([r, replace(r, outcome=FAILED)], 0.0, 8.0) == Throughput(
            requests_per_s=1 / 8,
            output_tokens_per_s=4 / 8,
            computed_tokens_per_s=44 / 8,
            total_tokens_per_s=104 / 8,
        )

    def test_only_what_falls_into_the_interval_counts(self):
        r = RequestTimeline("r", 0.0, (1.0, 2.0, 3.0, 4.0), 100)
        # The prompt was done at 1.0, before the interval; so was the first token.
        assert throughput([r], 1.0, 3.0) == Throughput(0.0, 1.0, 1.0, 1.0)

    def test_an_unfinished_request_counts_for_its_tokens(self):
        r = request(0.0, 1.0, 2.0, outcome=UNFINISHED)
        assert throughput([r], 0.0, 2.0) == Throughput(0.0, 1.0, 6.0, 6.0)

    def test_an_empty_interval_has_no_rate(self):
        with pytest.raises(AssertionError, match="empty interval"):
            throughput([], 1.0, 1.0)
        with pytest.raises(AssertionError, match="empty interval"):
            goodput_per_s([], SLO, 1.0, 1.0)

    @given(st.lists(timelines()), st.sets(st.integers(-1, 51), min_size=3, max_size=3))
    def test_neighbouring_intervals_add_up(self, group, bounds):
        start, middle, end = sorted(bounds)

        def counts(from_s: float, to_s: float) -> np.ndarray:
            rates = asdict(throughput(group, from_s, to_s)).values()
            return np.array(list(rates)) * (to_s - from_s)

        total = counts(start, middle) + counts(middle, end)
        np.testing.assert_allclose(total, counts(start, end), rtol=1e-9)

    def test_goodput_counts_requests_that_kept_the_promise_and_ended_in_time(self):
        group = [
            request(0.0, 1.0, 1.5),
            request(0.0, 1.0, 9.0),  # too slow
            request(10.0, 10.5, 11.0),  # ends after the interval
            request(0.0, 0.5, outcome=FAILED),
        ]
        assert goodput_per_s(group, SLO, 0.0, 10.0) == 0.1
        assert goodput_per_s(group, SLO, 0.0, 20.0) == 0.1
        assert goodput_per_s([], SLO, 0.0, 1.0) == 0.0
