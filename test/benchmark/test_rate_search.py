"""OOCO's search for the largest offline rate."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from coserve_bench.rate_search import Probe, RateSearch


def run_search(search: RateSearch, breaks_at: float, saturates_at: float = math.inf) -> None:
    """Search on a server whose violations pass the limit at one rate, and that never varies."""
    while (rate := search.next_rate()) is not None:
        violations = 0.0 if rate < breaks_at else 0.5
        search.record(Probe(rate, violations, 0.0, is_saturated=rate > saturates_at))


@given(
    breaks_at=st.floats(0.01, 1000),
    first=st.floats(0.05, 50),
    max_runs=st.integers(1, 40),
)
def test_the_result_is_good_and_close_unless_the_runs_end(
    breaks_at: float, first: float, max_runs: int
) -> None:
    search = RateSearch(first, max_runs)
    run_search(search, breaks_at)
    assert len(search.probes) <= max_runs
    rates = [probe.rate_per_s for probe in search.probes]
    assert len(set(rates)) == len(rates)
    if search.best is None:
        assert all(rate >= breaks_at for rate in rates)
    else:
        assert search.best.rate_per_s < breaks_at
        if len(search.probes) < max_runs:
            assert breaks_at <= 1.16 * search.best.rate_per_s


def test_a_server_that_cannot_serve_more_ends_the_search() -> None:
    search = RateSearch(1.0, 20)
    run_search(search, breaks_at=math.inf, saturates_at=3.0)
    assert [probe.rate_per_s for probe in search.probes] == [1.0, 2.0, 4.0]
    assert search.best is not None and search.best.is_saturated


def test_a_good_rate_above_a_bad_one_is_luck() -> None:
    search = RateSearch(1.0, 20)
    search.record(Probe(1.0, 0.0, 0.0, is_saturated=False))
    search.record(Probe(2.0, 0.04, 0.0, is_saturated=False))
    search.record(Probe(4.0, 0.0, 0.0, is_saturated=False))
    assert search.best is not None and search.best.rate_per_s == 1.0


def test_violations_at_the_limit_are_allowed() -> None:
    search = RateSearch(1.0, 1)
    search.record(Probe(1.0, 0.03, 0.0, is_saturated=False))
    assert search.best is not None
