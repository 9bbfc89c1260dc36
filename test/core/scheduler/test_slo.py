"""Targets for statistics, and the search for the budget that meets them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.budget_search import SloCheck, search_budget
from sglang_coserve.core.control.slo import (
    Latency,
    Slo,
    Statistic,
    format_slo,
    parse_slo,
    request_targets,
)
from sglang_coserve.errors import ConfigError, InfeasibleError
from sglang_coserve.metrics import LatencyReport, RequestTimeline, SloTargets, latency_report


def measured(tbt_s: float, ttft_s: float = 0.1) -> LatencyReport:
    """A request whose tokens come at a steady pace."""
    times = tuple(ttft_s + tbt_s * number for number in range(5))
    return latency_report([RequestTimeline("r", 0.0, times, prompt_tokens=1)])


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("tbt p99 <= 100ms", Slo(Latency.TBT, Statistic.P99, limit_s=0.1)),
        ("ttft mean<=1.5s", Slo(Latency.TTFT, Statistic.MEAN, limit_s=1.5)),
        ("tpot_p90=50 ms", Slo(Latency.TPOT, Statistic.P90, limit_s=0.05)),
        ("TBT-P50 <= +10%", Slo(Latency.TBT, Statistic.P50, tolerance=0.1)),
        ("ttft p99 +0%", Slo(Latency.TTFT, Statistic.P99, tolerance=0.0)),
    ],
)
def test_an_slo_is_read(text: str, slo: Slo) -> None:
    assert parse_slo(text) == slo


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "tbt p99",
        "tbt p95 <= 1s",
        "itl p99 <= 1s",
        "tbt p99 <= 1 min",
        "tbt p99 <= -1s",
        "tbt p99 <= 0ms",
        "tbt p99 <= 10%",
        "tbt p99 <= +10ms",
    ],
)
def test_anything_else_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write '\(ttft\|tpot\|tbt\)"):
        parse_slo(text)


@given(
    latency=st.sampled_from(Latency),
    statistic=st.sampled_from(Statistic),
    value=st.integers(1, 10**6),
    relative=st.booleans(),
)
def test_what_is_written_reads_the_same(
    latency: Latency, statistic: Statistic, value: int, relative: bool
) -> None:
    slo = (
        Slo(latency, statistic, tolerance=value / 1000)
        if relative
        else Slo(latency, statistic, limit_s=value / 1000)
    )
    again = parse_slo(format_slo(slo))
    assert (again.latency, again.statistic) == (latency, statistic)
    assert again.limit_s == pytest.approx(slo.limit_s)
    assert again.tolerance == pytest.approx(slo.tolerance)


def test_a_tolerance_is_relative_to_online_requests_alone() -> None:
    check = SloCheck((parse_slo("tbt mean <= +10%"),), online_only=measured(0.050))
    assert check.is_met(measured(0.0549))
    assert not check.is_met(measured(0.0551))


def test_a_tolerance_needs_that_measurement() -> None:
    for alone in (None, latency_report([])):
        with pytest.raises(ConfigError, match=r"tbt mean <= \+10%.*measure them first"):
            SloCheck((parse_slo("tbt mean <= +10%"),), alone).is_met(measured(0.05))


def test_every_target_must_hold_and_the_results_say_which_does() -> None:
    check = SloCheck((parse_slo("tbt p99 <= 60ms"), parse_slo("ttft p99 <= 80ms")))
    results = check.results(measured(0.05, ttft_s=0.1))
    assert [result.is_met for result in results] == [True, False]
    assert str(results[1]) == "ttft p99 100ms > 80ms"
    assert not check.is_met(measured(0.05, ttft_s=0.1))


def test_nothing_measured_exceeds_nothing() -> None:
    assert SloCheck((parse_slo("tbt p99 <= 60ms"),)).is_met(latency_report([]))


def test_requests_are_scheduled_by_the_tightest_target() -> None:
    slos = [parse_slo(text) for text in ("tbt p99 <= 0.1s", "tpot mean <= 50ms", "ttft p50 <= 1s")]
    assert request_targets(slos) == SloTargets(ttft_s=1.0, tpot_s=0.05)
    assert request_targets([]) == SloTargets()


@given(threshold_s=st.floats(0.002, 0.9), precision=st.floats(0.01, 0.3))
def test_the_search_closes_in_on_the_largest_budget(threshold_s: float, precision: float) -> None:
    """A machine whose tokens take as long as the budget allows."""
    check = SloCheck((Slo(Latency.TBT, Statistic.MEAN, limit_s=threshold_s),))
    found = search_budget(measured, check, 0.001, 1.0, relative_precision=precision, max_runs=100)
    assert found.budget_s <= threshold_s * (1 + 1e-9)
    assert found.budget_s * (1 + precision) >= threshold_s * (1 - 1e-9)
    assert not found.is_limit


def test_the_search_ends_after_its_runs() -> None:
    check = SloCheck((parse_slo("tbt p99 <= 100ms"),))
    found = search_budget(measured, check, 0.001, 1.0, relative_precision=1e-9, max_runs=6)
    assert len(found.runs) == 6
    best = [run.budget_s for run in found.runs if run.is_met]
    assert found.budget_s == max(best)


def test_an_upper_bound_that_meets_the_slo_is_the_answer() -> None:
    found = search_budget(measured, SloCheck((parse_slo("tbt p99 <= 9s"),)), 0.001, 1.0)
    assert (found.budget_s, found.is_limit, len(found.runs)) == (1.0, True, 2)


def test_an_infeasible_slo_names_the_nearest_one() -> None:
    def run(budget_s: float) -> LatencyReport:
        return measured(max(budget_s, 0.0312345), ttft_s=0.5)

    check = SloCheck((parse_slo("tbt p99 <= 20ms"), parse_slo("ttft p99 <= 1s")))
    with pytest.raises(InfeasibleError) as error:
        search_budget(run, check, 0.001, 1.0)
    assert "no budget meets 'tbt p99 <= 20ms'" in str(error.value)
    nearest = str(error.value).split("nearest feasible SLO is '")[1].split("'")[0]
    assert nearest == "tbt p99 <= 31.24ms"
    assert search_budget(run, SloCheck((parse_slo(nearest),)), 0.001, 1.0).budget_s > 0.03


@pytest.mark.parametrize(
    ("low_s", "high_s", "max_runs", "slos"),
    [(0.0, 1.0, 5, 1), (2.0, 1.0, 5, 1), (math.nan, 1.0, 5, 1), (0.1, 1.0, 1, 1), (0.1, 1.0, 5, 0)],
)
def test_a_search_that_makes_no_sense_is_refused(
    low_s: float, high_s: float, max_runs: int, slos: int
) -> None:
    check = SloCheck((parse_slo("tbt p99 <= 1s"),) * slos)
    with pytest.raises(ConfigError, match="budget search"):
        search_budget(measured, check, low_s, high_s, max_runs=max_runs)
