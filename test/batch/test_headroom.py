"""What could be added: what offline work gets, less what is promised of it."""

from __future__ import annotations

import pytest

from batch.records import a_batch
from sglang_coserve.batch.record import Status
from sglang_coserve.batch.service_status import headroom, required_tokens_per_s

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
    found = headroom(10.0, required_per_s=4.0)
    assert (found.tokens_per_s, found.headroom_tokens_per_s) == (10.0, pytest.approx(6.0))
    assert headroom(10.0, required_per_s=40.0).headroom_tokens_per_s == 0.0


def test_without_a_rate_nothing_is_said_of_it() -> None:
    found = headroom(None, required_per_s=4.0)
    assert (found.tokens_per_s, found.headroom_tokens_per_s) == (None, None)
