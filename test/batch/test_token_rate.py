"""The rate of tokens that estimates are made from."""

from __future__ import annotations

import pytest

from sglang_coserve.lines.backend import TokenRate


def test_the_rate_is_that_of_the_time_with_work() -> None:
    now_s = 100.0
    rate = TokenRate(lambda: now_s, window_s=10)
    assert rate.per_s() is None
    with rate.in_flight():
        now_s += 1
        rate.add(50)
        now_s += 1
        assert rate.per_s() == 25
    now_s += 1000  # Idle.
    assert rate.per_s() == 25
    with rate.in_flight(), rate.in_flight():
        now_s += 8
        assert rate.per_s() == 5
        rate.add(100)
        now_s += 2
        assert rate.per_s() == 10  # The first 50 are out of the window.
        now_s += 8
        assert rate.per_s() is None


def test_what_is_expected_stands_in_for_what_is_missing_of_ten_seconds() -> None:
    now_s = 0.0
    rate = TokenRate(lambda: now_s, window_s=20, expected_per_s=60)
    assert rate.per_s() == 60
    now_s += 1000  # Idle.
    assert rate.per_s() == 60
    with rate.in_flight():
        now_s += 2
        assert rate.per_s() == 48  # Nothing came in two seconds of ten.
        rate.add(50)
        assert rate.per_s() == 53
        now_s += 8
        assert rate.per_s() == 5
        now_s += 100
        assert rate.per_s() == pytest.approx(60 / 21)
