"""What corrects forecasts, errors of the past; and windows in words."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.batch.admission import window_s, window_text
from sglang_coserve.batch.errors import BatchRequestError
from sglang_coserve.batch.job_forecast import REMEMBERED, ForecastErrors, PastJob


def test_p95_holds_for_errors_of_any_distribution() -> None:
    rng = random.Random(7)
    errors, held, after = ForecastErrors(), 0, 0
    for number in range(2000):
        forecast_s = rng.uniform(10.0, 20.0)
        actual_s = forecast_s * rng.choice([0.5, 1.0, rng.paretovariate(1.5)])
        finish = errors.finish(forecast_s)
        assert finish.p05_s <= finish.p50_s <= finish.p95_s
        if number >= 50:
            after += 1
            held += actual_s <= finish.p95_s
        errors.add(PastJob(forecast_s, actual_s))
    assert 0.93 <= held / after <= 0.98
    assert len(errors) == REMEMBERED


def test_few_past_errors_leave_a_wide_range() -> None:
    errors = ForecastErrors([PastJob(10.0, 10.0)] * 5)
    few = errors.finish(100.0)
    assert few.p50_s == pytest.approx(100.0)
    for _ in range(14):
        errors.add(PastJob(10.0, 10.0))
    enough = errors.finish(100.0)
    assert few.p95_s > 2 * enough.p95_s == pytest.approx(200.0)


def test_the_newest_batches_count() -> None:
    errors = ForecastErrors([PastJob(1.0, 3.0)] * 100)
    for _ in range(20):
        errors.add(PastJob(10.0, 10.0))
    assert errors.finish(2.0).p50_s == pytest.approx(2.0)
    assert errors.finish(2.0).p95_s == pytest.approx(6.0)


def test_a_forecast_of_nothing_teaches_nothing() -> None:
    errors = ForecastErrors()
    errors.add(PastJob(0.0, 1.0))
    assert len(errors) == 0


@given(st.floats(0.1, 30 * 86_400.0))
def test_a_window_in_words_is_one_that_is_long_enough(seconds: float) -> None:
    asked_s = window_s(window_text(seconds), 366 * 86_400.0)
    assert seconds <= asked_s <= max(1.0, seconds + 60.0)


def test_no_window_is_shorter_than_a_second() -> None:
    assert window_text(0.0) == "1s"
    with pytest.raises(BatchRequestError):
        window_s("0s", 86_400.0)
