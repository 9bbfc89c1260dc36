"""What forecasts are made from: rates by the hour, and errors of the past."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.batch.errors import BatchRequestError
from sglang_coserve.batch.forecast_errors import REMEMBERED, ForecastErrors, PastJob
from sglang_coserve.batch.rate_forecast import HOUR_S, RateForecast, ServedTokens
from sglang_coserve.batch.window import window_s, window_text


def hours(*rates: float) -> dict[int, ServedTokens]:
    """Whole hours with work, from the epoch on."""
    return {hour: ServedTokens(rate * HOUR_S, HOUR_S) for hour, rate in enumerate(rates)}


def test_without_history_the_measured_rate_goes_on() -> None:
    rate = RateForecast(2.0, 12345.0)
    assert rate.delay_s(100.0) == pytest.approx(50.0)
    assert rate.delay_s(2 * 40 * 86_400.0) == pytest.approx(40 * 86_400.0)


def test_an_hour_of_the_day_is_expected_to_be_as_it_was() -> None:
    """Yesterday offline work got 10 tokens/s in the first hour of the day, and 1 in the second."""
    served, tomorrow_s = hours(10.0, 1.0), 24 * HOUR_S
    rate = RateForecast(10.0, tomorrow_s, served)
    assert rate.delay_s(10 * HOUR_S) == pytest.approx(HOUR_S, rel=0.01)
    # Half an hour at 10, then at 1; without history it would be 45 minutes.
    rate = RateForecast(10.0, tomorrow_s + HOUR_S / 2, served)
    assert rate.delay_s(10 * HOUR_S / 2 + 10 * HOUR_S / 4) > 1.5 * HOUR_S


def test_an_hour_that_has_only_begun_is_weighed_with_the_last_minute() -> None:
    """A minute at 1 token/s, and 10 tokens/s as measured last: 5.5 in between."""
    rate = RateForecast(10.0, 60.0, {0: ServedTokens(60.0, 60.0)})
    assert rate.delay_s(55.0) == pytest.approx(10.0)


def test_a_rate_of_weeks_ago_is_forgotten() -> None:
    rate = RateForecast(10.0, 30 * 24 * HOUR_S, hours(1.0))
    assert rate.delay_s(100.0) == pytest.approx(10.0)


@given(
    rates=st.lists(st.floats(0, 100), max_size=30),
    tokens=st.floats(0, 1e7),
    more=st.floats(0, 1e6),
)
def test_more_tokens_never_take_less_time(rates: list[float], tokens: float, more: float) -> None:
    rate = RateForecast(5.0, len(rates) * HOUR_S + 17.0, hours(*rates))
    assert rate.delay_s(tokens + more) >= rate.delay_s(tokens) - 1e-6


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


def test_batches_of_a_like_size_are_asked() -> None:
    """Small ones take three times as long as the rate alone makes of them."""
    past = [PastJob(1.0, 3.0)] * 100 + [PastJob(1000.0, 1000.0)] * 100
    errors = ForecastErrors(past)
    assert errors.finish(2.0).p50_s == pytest.approx(6.0)
    assert errors.finish(800.0).p50_s == pytest.approx(800.0)


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
