"""Statistics of recent values, from bins."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.control.recent_values import RecentValues, SlicedValues
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


@given(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=300))
def test_quantiles_of_slices_are_those_of_the_values_to_one_bin(values_s: list[float]) -> None:
    sliced = SlicedValues(600.0)
    for number, value_s in enumerate(values_s):
        sliced.add(value_s, float(number))
    now_s = float(len(values_s))
    count, quantiles_s = sliced.read(now_s, 0.5, 0.99)
    assert count == len(values_s)
    for found_s, percent in zip(quantiles_s, (50, 99), strict=True):
        around = (percent - 1e-3, percent + 1e-3)
        least_s, most_s = np.percentile(values_s, around, method="inverted_cdf")
        assert 0.989 * least_s <= found_s <= 1.011 * most_s


@given(
    st.lists(st.tuples(st.floats(0, 200), st.integers(1, 50)), min_size=1, max_size=60),
    st.floats(0, 700),
)
def test_values_are_forgotten_with_their_slice(
    added: list[tuple[float, int]], later_s: float
) -> None:
    sliced, now_s, times = SlicedValues(600.0), 0.0, []
    for after_s, count in added:
        now_s += after_s
        times.append((now_s, count))
        sliced.add(0.01, now_s, count)
    now_s += later_s
    least = sum(count for at_s, count in times if at_s > now_s - 590.0)
    most = sum(count for at_s, count in times if at_s > now_s - 610.0)
    count, quantiles_s = sliced.read(now_s, 0.5)
    assert least <= count <= most
    assert bool(quantiles_s) == bool(count)


def test_a_busy_window_needs_little_memory() -> None:
    sliced = SlicedValues(600.0)
    for number in range(200_000):
        sliced.add(0.01 + 1e-4 * (number % 500), number * 0.01)
    assert sliced.read(2000.0)[0] == pytest.approx(60_000, rel=0.02)
    assert len(sliced._slices) <= 60
    assert max(len(bins) for _, bins in sliced._slices) < 250


def test_a_value_that_comes_late_counts_as_of_the_last_slice() -> None:
    sliced = SlicedValues(600.0)
    sliced.add(0.01, 700.0)
    sliced.add(0.01, 50.0)
    assert (sliced.read(700.0), sliced.read(1500.0)) == ((2, ()), (0, ()))
