"""The delay due to offline work, against the sum over all iterations."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.offline_delay import OfflineDelay

# Multiples of 1/1024 s, so that sums are exact.
ticks = st.integers(0, 64).map(lambda count: count / 1024)


@st.composite
def iterations(draw: st.DrawFn) -> list[tuple[float, float, float]]:
    """Start, end and delay of iterations, pauses between them."""
    steps = draw(st.lists(ticks, max_size=40))
    spans = list(pairwise(accumulate(steps, initial=0.0)))[::2]
    shares = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    return [(start, end, (end - start) * draw(shares)) for start, end in spans if start < end]


def summed(spans: list[tuple[float, float, float]], start_s: float, end_s: float) -> float:
    overlaps = (
        (max(0.0, min(end, end_s) - max(start, start_s)) / (end - start), delay)
        for start, end, delay in spans
    )
    return sum(share * delay for share, delay in overlaps)


@given(spans=iterations(), start_s=ticks.map(lambda t: t * 20), length_s=ticks.map(lambda t: t * 9))
def test_the_delay_between_two_times_is_that_of_the_iterations_there(
    spans: list[tuple[float, float, float]], start_s: float, length_s: float
) -> None:
    delay = OfflineDelay()
    for span in spans:
        delay.add(*span)
    end_s = start_s + length_s
    expected = pytest.approx(summed(spans, start_s, end_s), abs=1e-9)
    assert delay.between(start_s, end_s) == expected
    assert delay.between(start_s, end_s) == expected, "the same question again"
    assert 0 <= delay.between(start_s, end_s) <= length_s


@given(spans=iterations(), kept=st.integers(1, 5))
def test_only_the_last_iterations_are_remembered(
    spans: list[tuple[float, float, float]], kept: int
) -> None:
    delay = OfflineDelay(min_iterations=kept)
    for span in spans:
        delay.add(*span)
    recent = spans[-kept:]
    if recent:
        start_s, end_s = recent[0][0], recent[-1][1]
        assert delay.between(start_s, end_s) == pytest.approx(summed(recent, start_s, end_s))
        assert delay.between(0.0, end_s) <= summed(spans, 0.0, end_s) + 1e-9


def test_an_arrival_halfway_waits_for_half_of_it() -> None:
    delay = OfflineDelay()
    delay.add(10.0, 12.0, 1.5)
    assert delay.between(11.0, 20.0) == 0.75
    delay.add(20.0, 21.0, 1.0)
    assert delay.between(11.0, 20.0) == 0.75
    assert delay.between(11.0, 21.0) == 1.75


def test_no_time_counts_twice() -> None:
    delay = OfflineDelay()
    delay.add(0.0, 2.0, 2.0)
    delay.add(1.0, 3.0, 2.0)
    delay.add(2.0, 3.0, 1.0)
    assert delay.between(0.0, 3.0) == 3.0
