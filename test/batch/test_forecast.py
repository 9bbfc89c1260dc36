"""When batches will be complete, how sure that is, how it is told; and what could be added."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch.records import a_batch
from sglang_coserve.batch.admission import window_s, window_text
from sglang_coserve.batch.errors import BatchRequestError
from sglang_coserve.batch.forecast import (
    PastBatches,
    RemainingWork,
    headroom,
    job_forecasts,
    remaining_tokens,
    served_before,
)
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.record import JobRecord
from sglang_coserve.batch.schemas import BatchObject
from sglang_coserve.errors import ConfigError
from sglang_coserve.lines.result_record import Progress, Usage


def errors_of(*actual_s: float, forecast_s: float = 1.0) -> PastBatches:
    """Of batches that took so long, the oldest first."""
    errors = PastBatches()
    for each in actual_s:
        errors.add(forecast_s, each)
    return errors


EXACT = errors_of(*[1.0] * 20)
"""Nobody was ever wrong."""

SOMETIMES_LATE = errors_of(*[1.0] * 18, *[1.1] * 2)
"""P95 is a tenth later than P50."""

works = st.lists(
    st.builds(
        RemainingWork,
        owner=st.sampled_from(["a", "b", "c"]),
        tokens=st.floats(0, 1000),
        priority=st.integers(0, 2),
        weight=st.sampled_from([0.25, 1.0, 4.0]),
    ),
    min_size=1,
    max_size=5,
)


def simulated(batches: list[RemainingWork], tokens_per_s: float) -> list[float]:
    """Serve every owner alike, of each the highest priority by weight, from one completion to
    the next."""
    left = [work.tokens for work in batches]
    ended = [0.0 if not tokens else -1.0 for tokens in left]
    now_s = 0.0
    while any(at < 0 for at in ended):
        pending = [i for i, at in enumerate(ended) if at < 0]
        rates: dict[int, float] = {}
        owners = {batches[i].owner for i in pending}
        for owner in owners:
            own = [i for i in pending if batches[i].owner == owner]
            top = max(batches[i].priority for i in own)
            served = [i for i in own if batches[i].priority == top]
            total = sum(batches[i].weight for i in served)
            for i in served:
                rates[i] = tokens_per_s / len(owners) * batches[i].weight / total
        step_s = min(left[i] / rate for i, rate in rates.items())
        now_s += step_s
        for i, rate in rates.items():
            left[i] -= step_s * rate
            if left[i] <= 1e-9 * (1 + batches[i].tokens):
                ended[i] = now_s
    return ended


@given(batches=works, tokens_per_s=st.sampled_from([0.5, 10.0, 5000.0]))
def test_delays_are_those_of_a_simulation(
    batches: list[RemainingWork], tokens_per_s: float
) -> None:
    delays = [tokens / tokens_per_s for tokens in served_before(batches)]
    for work, delay, expected in zip(
        batches, delays, simulated(batches, tokens_per_s), strict=True
    ):
        if work.tokens:
            assert delay == pytest.approx(expected, rel=1e-6, abs=1e-6)
    total_s = sum(work.tokens for work in batches) / tokens_per_s
    assert max(delays) == pytest.approx(total_s)


def served(**changes: object) -> JobRecord:
    return a_batch(**{"total_lines": 100, "estimated_tokens": 1000, **changes})


@given(batches=works)
def test_one_that_goes_first_waits_for_what_the_other_owners_get(
    batches: list[RemainingWork],
) -> None:
    """As much as it gets itself, or all that they have to do."""
    owners: dict[str, float] = {}
    for work in batches:
        owners[work.owner] = owners.get(work.owner, 0.0) + work.tokens
    records = [
        a_batch(id=str(n), owner=work.owner, estimated_tokens=work.tokens)
        for n, work in enumerate(batches)
    ]
    found = job_forecasts(records, 1.0, 0.0, EXACT)
    for n, work in enumerate(batches):
        if work.tokens:
            first_s = sum(min(tokens, work.tokens) for tokens in owners.values())
            assert found[str(n)].first_s == pytest.approx(first_s)


class Owner(str):
    """To compare it is a call."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


def calls_of(work: Callable[[], object]) -> int:
    """How many functions are called, and values taken of generators."""
    events: Counter[str] = Counter()
    before = sys.getprofile()
    sys.setprofile(lambda _frame, event, _arg: events.update([event]))
    try:
        work()
    finally:
        sys.setprofile(before)
    return events["call"] + events["c_call"]


def test_a_forecast_of_twice_as_many_owners_is_twice_the_work() -> None:
    """There may be thousands, and the event loop waits for it once a second."""

    def calls(count: int) -> int:
        batches = [served(id=str(n), owner=Owner(n)) for n in range(count)]
        return calls_of(lambda: job_forecasts(batches, 10.0, 0.0, EXACT))

    assert calls(200) < 2.5 * calls(100)


def test_what_is_left_is_corrected_by_what_was_served() -> None:
    assert remaining_tokens(served()) == 1000
    done = Progress(completed=80, usage=Usage(0, 0, 1600), estimated_tokens=800)
    # 80 lines took twice as long as expected, and the estimate weighs as much as 20 lines.
    assert remaining_tokens(served(progress=done)) == pytest.approx(200 * 1.8)
    assert remaining_tokens(a_batch()) == 0


def test_what_other_batches_took_corrects_one_that_has_yet_to_begin() -> None:
    assert remaining_tokens(served(), 0.5) == pytest.approx(500)
    unvalidated = a_batch(estimated_tokens=1000)
    assert remaining_tokens(unvalidated, 0.5) == pytest.approx(500)
    done = Progress(completed=80, usage=Usage(0, 0, 800), estimated_tokens=800)
    assert remaining_tokens(served(progress=done), 0.5) == pytest.approx(200 * 0.9)


def test_errors_of_the_past_say_how_sure_a_forecast_is() -> None:
    job_forecast = job_forecasts([served()], 10.0, 1000.0, SOMETIMES_LATE)["batch_1"]
    assert job_forecast.forecast_s == pytest.approx(100.0)
    assert job_forecast.eta_s == pytest.approx(1100.0)
    assert job_forecast.eta_p95_s == pytest.approx(1110.0)
    shown = BatchObject.of(served(), job_forecast).coserve
    assert (shown.eta, shown.eta_p95) == (1100, 1110)


def test_an_unknown_rate_gives_no_eta() -> None:
    job_forecast = job_forecasts([served()], None, 0.0, EXACT)["batch_1"]
    assert job_forecast.eta_s is None and not job_forecast.is_urgent and not job_forecast.is_late


def test_a_window_that_cannot_be_kept_is_told_in_words() -> None:
    batch = served(expires_at_s=100.0)
    job_forecast = job_forecasts([batch], 5.0, 0.0, EXACT)["batch_1"]
    shown = BatchObject.of(batch, job_forecast, None).coserve
    assert (shown.eta, shown.rate_tokens_per_s) == (200, 5.0)
    assert shown.warning is not None
    assert "expected to be complete at 1970-01-01T00:03:20+00:00, 100 s after" in shown.warning
    assert BatchObject.of(batch, job_forecast, "disk full").coserve.warning == "disk full"
    in_time = job_forecasts([batch], 50.0, 0.0, EXACT)["batch_1"]
    assert BatchObject.of(batch, in_time, None).coserve.warning is None


def test_only_a_window_that_going_first_can_keep_is_urgent() -> None:
    """1,000 tokens each at 10 tokens/s: 100 s alone, 200 s together."""
    others = served(id="batch_2", expires_at_s=10_000.0)
    for expires_at_s, is_urgent in ((90.0, False), (150.0, True), (215.0, True), (250.0, False)):
        batch = served(expires_at_s=expires_at_s)
        found = job_forecasts([batch, others], 10.0, 0.0, SOMETIMES_LATE)
        assert found["batch_1"].is_urgent == is_urgent, expires_at_s
        assert not found["batch_2"].is_urgent


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("24h", 86400),
        ("30m", 1800),
        ("7d", 604800),
        ("1h30m", 5400),
        ("90s", 90),
        ("1d1h1m1s", 90061),
    ],
)
def test_windows(text: str, seconds: float) -> None:
    assert window_s(text, 366 * 86400) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "24", "h", "-1h", "1.5h", "1 h", "1H", "24hours", "0s", "367d", "9" * 50 + "d", "٣h"],
)
def test_what_is_no_window(text: str) -> None:
    with pytest.raises(BatchRequestError, match="completion_window") as caught:
        window_s(text, 366 * 86400)
    assert caught.value.param == "completion_window"


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_limits_are_positive(value: float) -> None:
    with pytest.raises(ConfigError, match="max_window_s must be greater than 0"):
        BatchLimits(max_window_s=value)


def test_few_past_errors_leave_a_wide_range() -> None:
    errors = errors_of(*[10.0] * 5, forecast_s=10.0)
    few = errors.finish(100.0)
    assert few.p50_s == pytest.approx(100.0)
    for _ in range(14):
        errors.add(10.0, 10.0)
    enough = errors.finish(100.0)
    assert few.p95_s > 2 * enough.p95_s == pytest.approx(200.0)


def test_the_newest_batches_count() -> None:
    errors = errors_of(*[3.0] * 100)
    for _ in range(20):
        errors.add(10.0, 10.0)
    assert errors.finish(2.0).p50_s == pytest.approx(2.0)
    assert errors.finish(2.0).p95_s == pytest.approx(6.0)


def test_a_forecast_of_nothing_teaches_nothing() -> None:
    errors = errors_of(1.0, forecast_s=0.0)
    assert len(errors) == 0


@given(st.floats(0.1, 30 * 86_400.0))
def test_a_window_in_words_is_one_that_is_long_enough(seconds: float) -> None:
    asked_s = window_s(window_text(seconds), 366 * 86_400.0)
    assert seconds <= asked_s <= max(1.0, seconds + 60.0)


ONE_HOUR = served(estimated_tokens=7200)


def test_a_batch_needs_its_tokens_within_its_window() -> None:
    batches = [ONE_HOUR, replace(ONE_HOUR, expires_at_s=7200.0)]
    assert headroom(batches, None, 0.0).required_tokens_per_s == pytest.approx(2.0 + 1.0)


def test_a_window_that_is_over_needs_no_infinite_rate() -> None:
    assert headroom([ONE_HOUR], None, 4000.0).required_tokens_per_s == pytest.approx(7200 / 60)


@pytest.mark.parametrize(("rate_per_s", "spare_per_s"), [(10.0, 8.0), (1.0, 0.0), (None, None)])
def test_what_is_left_can_be_added(rate_per_s: float | None, spare_per_s: float | None) -> None:
    found = headroom([ONE_HOUR], rate_per_s, 0.0)
    assert (found.tokens_per_s, found.headroom_tokens_per_s) == (rate_per_s, spare_per_s)
