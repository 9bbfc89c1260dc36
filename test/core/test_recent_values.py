"""Statistics of recent values, from bins."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.control.recent_values import RecentValues
from sglang_coserve.core.control.slo import Statistic

QUANTILES = {Statistic.P50: 50, Statistic.P90: 90, Statistic.P99: 99}


def holding(values_s: list[float]) -> RecentValues:
    recent = RecentValues(600.0)
    for value_s in values_s:
        recent.add(value_s, 0.0)
    return recent


@given(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=300))
def test_statistics_are_those_of_the_values_to_one_bin(values_s: list[float]) -> None:
    recent = holding(values_s)
    for statistic, percent in QUANTILES.items():
        around = (percent - 1e-3, percent + 1e-3)  # It is computed in another way.
        least_s, most_s = np.percentile(values_s, around, method="inverted_cdf")
        assert 0.989 * least_s <= recent.statistic(statistic) <= 1.011 * most_s
    assert recent.statistic(Statistic.MEAN) == pytest.approx(np.mean(values_s))


def test_what_is_older_than_the_window_counts_no_more() -> None:
    recent = RecentValues(600.0)
    for second in range(700):
        recent.add(9.0, float(second), 3)
    for second in range(700, 1400):
        recent.add(1.0, float(second))
    assert recent.count == 600
    assert recent.statistic(Statistic.MEAN) == pytest.approx(1.0)
    for late_s in (1e6, 2e6):
        recent.add(2.0, late_s)
    assert (recent.count, recent.statistic(Statistic.P50)) == (1, pytest.approx(2.0, rel=0.01))


@given(st.lists(st.tuples(st.floats(0, 300), st.integers(1, 50)), min_size=1, max_size=100))
def test_the_last_few_are_never_forgotten(added: list[tuple[float, int]]) -> None:
    recent, now_s, count = RecentValues(600.0, at_least=100), 0.0, 0
    for after_s, more in added:
        now_s += after_s
        recent.add(1.0, now_s, more)
        count += more
        assert recent.count >= min(count, 100)
    assert recent.statistic(Statistic.MEAN) == pytest.approx(1.0)


@pytest.mark.parametrize("value_s", [0.0, 1e9, math.inf, 1e308, 5e-324, -1.0, math.nan])
def test_values_out_of_range_count_at_its_ends(value_s: float) -> None:
    recent = RecentValues(10.0)
    recent.add(value_s, 0.0)
    assert 0 < recent.statistic(Statistic.MEAN) < math.inf
    assert recent.statistic(Statistic.P50) > 0
    assert (recent.statistic(Statistic.P50) == math.inf) == (value_s >= 1e308)
