"""Statistics of recent values, from bins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.control.recent_values import RecentValues
from sglang_coserve.core.control.slo import Statistic

QUANTILES = {Statistic.P50: 50, Statistic.P90: 90, Statistic.P99: 99}


def holding(values_s: list[float]) -> RecentValues:
    recent = RecentValues(1 << 30)
    for value_s in values_s:
        recent.add(value_s)
    return recent


@given(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=300))
def test_statistics_are_those_of_the_values_to_one_bin(values_s: list[float]) -> None:
    recent = holding(values_s)
    for statistic, percent in QUANTILES.items():
        # The oldest weighs a little less.
        around = (percent - 1e-3, percent + 1e-3)
        least_s, most_s = np.percentile(values_s, around, method="inverted_cdf")
        assert 0.989 * least_s <= recent.statistic(statistic) <= 1.011 * most_s
    assert recent.statistic(Statistic.MEAN) == pytest.approx(np.mean(values_s))


def test_the_share_above_a_value_is_that_of_the_bins_above_its_own() -> None:
    recent = holding([0.1, 0.2, 0.3, 0.4])
    assert [recent.share_above(at_s) for at_s in (0.05, 0.25, 0.5)] == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize("span", [10, 1000])
def test_what_is_many_spans_old_counts_no_more(span: int) -> None:
    """Also after the weights have grown so large that they are scaled down."""
    recent = RecentValues(span)
    for value_s in [9.0] * 40 * span + [1.0] * 10 * span:
        recent.add(value_s)
    assert recent.statistic(Statistic.P99) == pytest.approx(1.0, rel=0.01)
    assert recent.statistic(Statistic.MEAN) == pytest.approx(1.0, rel=0.01)
    recent.add(2.0, span)
    assert recent.statistic(Statistic.P50) == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("value_s", [0.0, 1e9])
def test_values_out_of_range_count_at_its_ends(value_s: float) -> None:
    recent = RecentValues(10)
    recent.add(value_s)
    assert 0 < recent.statistic(Statistic.P50) < 1e5
