"""What could be added: what offline work gets, less what is promised of it."""

from __future__ import annotations

import pytest

from batch.records import a_batch
from sglang_coserve.batch.headroom import headroom, required_tokens_per_s
from sglang_coserve.batch.rate_forecast import HOUR_S, RateForecast, ServedTokens
from sglang_coserve.batch.record import Status

SERVED = {
    "status": Status.IN_PROGRESS,
    "total_lines": 100,
    "estimated_tokens": 7200,
    "expires_at_s": 3600.0,
}


def test_a_batch_needs_its_tokens_within_its_window() -> None:
    batches = [a_batch(**SERVED), a_batch(**{**SERVED, "expires_at_s": 7200.0})]
    assert required_tokens_per_s(batches, now_s=0.0) == pytest.approx(2.0 + 1.0)


def test_a_window_that_is_over_needs_no_infinite_rate() -> None:
    assert required_tokens_per_s([a_batch(**SERVED)], now_s=4000.0) == pytest.approx(7200 / 60)


def test_what_is_left_can_be_added() -> None:
    rate = RateForecast(10.0, 0.0)
    found = headroom(rate, 10.0, required_per_s=4.0, now_s=0.0)
    assert found.headroom_tokens_per_s == pytest.approx(6.0)
    assert headroom(rate, 10.0, required_per_s=40.0, now_s=0.0).headroom_tokens_per_s == 0.0


def test_hours_with_history_say_so() -> None:
    """Yesterday the second hour had 100 tokens/s; of the others nothing is known."""
    now_s = 24 * HOUR_S + 10.0
    rate = RateForecast(10.0, now_s, {1: ServedTokens(100 * HOUR_S, HOUR_S)})
    found = headroom(rate, 10.0, required_per_s=0.0, now_s=now_s).by_hour
    assert len(found) == 24
    assert found[0].starts_at == 24 * HOUR_S
    assert [hour.is_measured for hour in found[:3]] == [False, True, False]
    assert found[1].tokens_per_s == pytest.approx(100.0, rel=0.03)
    assert found[2].tokens_per_s == pytest.approx(10.0)


def test_without_a_rate_nothing_is_said_of_it() -> None:
    found = headroom(None, None, required_per_s=4.0, now_s=0.0)
    assert (found.tokens_per_s, found.headroom_tokens_per_s, found.by_hour) == (None, None, ())
