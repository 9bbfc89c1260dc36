"""One first token in a hundred is late in the long run, by what was measured."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.late_first_tokens import LateFirstTokens

LIMIT_S = 1.0


def after(*ttfts_s: float, added_s: float = math.inf) -> LateFirstTokens:
    """Requests with these latencies, late because of offline work unless told otherwise."""
    late = LateFirstTokens()
    for ttft_s in ttfts_s:
        late.observe(ttft_s, added_s, LIMIT_S)
    return late


def test_a_late_request_shortens_the_wait_and_a_hundred_in_time_restore_it() -> None:
    assert after(0.5).factor == 1.0
    assert after(1.5).factor == pytest.approx(0.97, abs=0.001)
    assert after(1.5, *[0.5] * 99).factor == pytest.approx(1.0)


def test_a_request_that_is_late_without_offline_work_says_nothing() -> None:
    assert after(1.5, added_s=0.4).factor == 1.0
    assert after(1.5, added_s=0.6).factor < 1.0
    assert after(*[1.5] * 5, added_s=0.6).factor == pytest.approx(0.97**5, abs=0.01)


def test_in_the_long_run_one_in_a_hundred_is_late() -> None:
    """Where less time for offline work makes fewer late, the factor settles where 1% are."""
    rng, late, num_late = random.Random(3), LateFirstTokens(), 0
    for _ in range(40_000):
        ttft_s = rng.expovariate(1.0) * 0.6 * late.factor
        num_late += ttft_s > LIMIT_S
        late.observe(ttft_s, math.inf, LIMIT_S)
    assert num_late / 40_000 == pytest.approx(0.01, rel=0.1)


@given(st.lists(st.floats(0.0, 3.0)))
def test_the_factor_stays_within_its_bounds(ttfts_s: list[float]) -> None:
    assert 1 / 8 - 1e-9 <= after(*ttfts_s).factor <= 1.0
