"""One first token in a hundred is late in the long run, by what was measured."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.late_first_tokens import LateFirstTokens, Wait

LIMIT_S = 1.0


def batch(tokens: int) -> BatchStats:
    return BatchStats.of([(tokens, 0)])


def waits(arrival_s: float, added_s: float = math.inf) -> tuple[Wait, ...]:
    """One request, late because of offline work unless told otherwise."""
    return (Wait(arrival_s, added_s),)


def after(*iterations: tuple[float, float | None], added_s: float = math.inf) -> LateFirstTokens:
    """Iterations of one request each, by their predicted and their measured length."""
    late = LateFirstTokens()
    for number, (predicted_s, seconds) in enumerate(iterations):
        start_s = 10.0 * number
        late.expect(batch(number + 1), start_s, predicted_s, waits(start_s, added_s), LIMIT_S)
        if seconds is not None:
            late.measured(batch(number + 1), seconds)
    for _ in range(3):
        late.expect(BatchStats(), 1e4, 0.0, (), LIMIT_S)
    return late


def test_a_late_request_shortens_the_wait_and_a_hundred_in_time_restore_it() -> None:
    assert after((0.5, 0.5)).factor == 1.0
    late = after((0.5, 1.5))
    assert late.factor == pytest.approx(0.97, abs=0.001)
    assert after((0.5, 1.5), *[(0.5, 0.5)] * 99).factor == pytest.approx(1.0)


def test_a_request_that_is_late_without_offline_work_says_nothing() -> None:
    assert after((0.5, 1.5), added_s=0.4).factor == 1.0
    assert after((0.5, 1.5), added_s=0.6).factor < 1.0
    assert after(*[(0.5, 1.5)] * 5, added_s=0.6).factor == pytest.approx(0.97**5, abs=0.01)


def test_what_was_measured_counts_and_not_what_was_predicted() -> None:
    assert after((1.5, 0.5)).factor == 1.0
    assert after((0.5, 1.5)).factor < 1.0


def test_an_iteration_that_is_never_measured_counts_as_it_was_predicted() -> None:
    assert after((1.5, None)).factor < 1.0
    assert after((0.5, None)).factor == 1.0


def test_a_measurement_may_come_an_iteration_later() -> None:
    late = LateFirstTokens()
    late.expect(batch(1), 0.0, 0.5, waits(0.0), LIMIT_S)
    late.expect(batch(2), 0.5, 0.5, waits(0.5), LIMIT_S)
    late.measured(batch(1), 1.5)
    assert late.factor < 1.0
    late.measured(batch(1), 1.5)  # Counts once.
    assert late.factor == pytest.approx(after((0.5, 1.5)).factor)


def test_in_the_long_run_one_in_a_hundred_is_late() -> None:
    """Where less time for offline work makes fewer late, the factor settles where 1% are."""
    rng, late, num_late = random.Random(3), LateFirstTokens(), 0
    for number in range(40_000):
        seconds = rng.expovariate(1.0) * 0.6 * late.factor
        num_late += seconds > LIMIT_S
        late.expect(batch(1), 10.0 * number, 0.5, waits(10.0 * number), LIMIT_S)
        late.measured(batch(1), seconds)
    assert num_late / 40_000 == pytest.approx(0.01, rel=0.1)


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.one_of(st.none(), st.floats(0.0, 3.0)))))
def test_the_factor_stays_within_its_bounds(
    iterations: list[tuple[float, float | None]],
) -> None:
    assert 1 / 8 - 1e-9 <= after(*iterations).factor <= 1.0
