"""Targets for statistics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.control.slo import (
    Latency,
    Slo,
    Statistic,
    format_slo,
    parse_slo,
)
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import LatencyReport, RequestTimeline, latency_report


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
    assert parse_slo("tbt mean <= +10%").limit_over(measured(0.050)) == pytest.approx(0.055)
    assert parse_slo("ttft p99 <= 80ms").limit_over(None) == pytest.approx(0.08)


def test_a_tolerance_needs_that_measurement() -> None:
    for alone in (None, latency_report([])):
        with pytest.raises(ConfigError, match=r"tbt mean <= \+10%.*measure them first"):
            parse_slo("tbt mean <= +10%").limit_over(alone)
