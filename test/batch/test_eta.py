"""When batches will be complete, what is said of those that will be late, what could be added."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch.records import a_batch
from batch.scenarios import OWNER, lines, opened
from batch.scripted_backend import ScriptedBackend
from sglang_coserve.batch.admission import window_s, window_text
from sglang_coserve.batch.eta import Eta, Forecasts, headroom, remaining_tokens
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.record import JobRecord
from sglang_coserve.batch.schemas import BatchObject
from sglang_coserve.errors import ConfigError
from sglang_coserve.lines.result_record import Progress, Usage
from sglang_coserve.web.errors import ApiError


def served(**changes: object) -> JobRecord:
    return a_batch(**{"total_lines": 100, "estimated_tokens": 1000, **changes})


def etas(batches: list[JobRecord], rate_per_s: float | None, now_s: float) -> dict[str, Eta]:
    """The forecasts of all batches by id."""
    forecasts = Forecasts(batches, rate_per_s)
    found = {batch.id: forecasts.eta(batch, now_s) for batch in batches}
    return {batch_id: eta for batch_id, eta in found.items() if eta is not None}


unfinished = st.lists(
    st.builds(
        served,
        id=st.uuids().map(str),
        owner=st.sampled_from("abc"),
        estimated_tokens=st.integers(1, 1000),
        priority=st.integers(0, 2),
        expires_at_s=st.floats(1.0, 1e6),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda batch: batch.expires_at_s,
)


def simulated(batches: list[JobRecord], rate_per_s: float) -> dict[str, float]:
    """Serve every owner alike, of each the highest priority and the earliest deadline, from one
    completion to the next."""
    left = {batch.id: float(batch.estimated_tokens) for batch in batches}
    ended: dict[str, float] = {}
    now_s = 0.0
    while len(ended) < len(batches):
        pending = [batch for batch in batches if batch.id not in ended]
        own = [[each for each in pending if each.owner == owner] for owner in "abc"]
        running = [min(each, key=lambda b: (-b.priority, b.expires_at_s)) for each in own if each]
        each_per_s = rate_per_s / len(running)
        step_s = min(left[batch.id] for batch in running) / each_per_s
        now_s += step_s
        for batch in running:
            left[batch.id] -= step_s * each_per_s
            if left[batch.id] <= 1e-9 * batch.estimated_tokens:
                ended[batch.id] = now_s
    return ended


@given(batches=unfinished, rate_per_s=st.sampled_from([0.5, 10.0, 5000.0]))
def test_etas_are_those_of_a_simulation(batches: list[JobRecord], rate_per_s: float) -> None:
    found = etas(batches, rate_per_s, 1000.0)
    for batch_id, left_s in simulated(batches, rate_per_s).items():
        assert found[batch_id].at_s - 1000.0 == pytest.approx(left_s, rel=1e-6, abs=1e-6)
    for batch in batches:
        left_s = found[batch.id].at_s - 1000.0
        tokens = found[batch.id].rate_tokens_per_s * left_s
        assert tokens == pytest.approx(batch.estimated_tokens)


@given(batches=unfinished, rate_per_s=st.sampled_from([0.5, 10.0, 5000.0]))
def test_a_batch_that_was_not_there_is_told_the_same(
    batches: list[JobRecord], rate_per_s: float
) -> None:
    new = batches[-1]
    told = Forecasts(batches[:-1], rate_per_s).eta(new, 0.0)
    expected = etas(batches, rate_per_s, 0.0)[new.id]
    assert told is not None
    assert told == pytest.approx(expected, rel=1e-6, abs=1e-6)


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


def test_etas_of_twice_as_many_owners_are_twice_the_work() -> None:
    """There may be thousands, and the event loop waits for them."""

    def calls(count: int) -> int:
        batches = [served(id=str(n), owner=Owner(n)) for n in range(count)]
        return calls_of(lambda: Forecasts(batches, 10.0))

    assert calls(200) < 2.5 * calls(100)


def test_a_look_at_one_batch_costs_the_same_beside_any_number() -> None:
    def calls(count: int) -> int:
        batches = [served(id=str(n), owner=Owner(n % 7)) for n in range(count)]
        forecasts = Forecasts(batches, 10.0)
        return calls_of(lambda: forecasts.eta(batches[-1], 0.0))

    assert calls(1000) == calls(10)


def test_what_is_left_is_corrected_by_what_was_served() -> None:
    assert remaining_tokens(served()) == 1000
    done = Progress(completed=80, usage=Usage(0, 0, 1600), estimated_tokens=800)
    # 80 lines took twice as long as expected, and the estimate weighs as much as 20 lines.
    assert remaining_tokens(served(progress=done)) == pytest.approx(200 * 1.8)
    assert remaining_tokens(a_batch(estimated_tokens=1000)) == 1000
    assert remaining_tokens(a_batch()) == remaining_tokens(a_batch(total_lines=5)) == 0


def test_an_unknown_rate_gives_no_eta() -> None:
    assert etas([served()], None, 0.0) == {}


def test_a_batch_with_nothing_left_ends_now() -> None:
    assert etas([a_batch()], 10.0, 5.0) == {"batch_1": (5.0, 0.0)}


def test_an_eta_is_a_date_however_slow_the_engine() -> None:
    late = etas([served()], 1e-9, 0.0)["batch_1"]
    assert "expected to be complete at 2069" in (
        BatchObject.of(served(), late).coserve.warning or ""
    )


def test_a_window_that_will_be_missed_is_told_in_words() -> None:
    batch = served(expires_at_s=100.0)
    late = etas([batch], 5.0, 0.0)["batch_1"]
    shown = BatchObject.of(batch, late).coserve
    assert (shown.eta, shown.rate_tokens_per_s) == (200, 5.0)
    assert shown.warning is not None
    assert "expected to be complete at 1970-01-01T00:03:20+00:00, 100 s after" in shown.warning
    assert BatchObject.of(batch, late, stalled_by="disk full").coserve.warning == "disk full"
    in_time = etas([batch], 50.0, 0.0)["batch_1"]
    assert BatchObject.of(batch, in_time).coserve.warning is None


async def test_a_batch_that_would_be_late_is_accepted_with_a_warning(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True, tokens_per_s=1.0)
    async with (scene := await opened(tmp_path, backend)).service as service:
        late = await scene.create(lines(10, max_tokens=1_000_000), "10s")
        assert late.status == "validating"
        assert "after the window of 10s closes" in (late.coserve.warning or "")
        await service.change_batch(OWNER, late.id, "cancel")
        await scene.ends(late.id)  # Until then it is served before a later deadline.
        in_time = await scene.create(lines(1, max_tokens=10))
        assert in_time.coserve.eta is not None and in_time.coserve.warning is None


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
    with pytest.raises(ApiError, match="completion_window") as caught:
        window_s(text, 366 * 86400)
    assert caught.value.param == "completion_window"


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_limits_are_positive(value: float) -> None:
    with pytest.raises(ConfigError, match="max_window_s must be greater than 0"):
        BatchLimits(max_window_s=value)


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
