"""The objective: targets of an operator, and defaults for latencies without a target."""

from __future__ import annotations

import pytest

from sglang_coserve.config import OFFLINE_POLICIES
from sglang_coserve.core.control.objective import (
    ONLINE_SLOWDOWN,
    STREAM_SLOWDOWN,
    Objective,
    parse_slowdown,
)
from sglang_coserve.core.control.slo import format_slo, parse_slo
from sglang_coserve.errors import ConfigError


def objective(
    *slos: str,
    policy: str = "coserve",
    online_slowdown: float | None = None,
    stream_slowdown: float | None = None,
) -> Objective:
    targets = [parse_slo(text) for text in slos]
    return Objective.of(policy, targets, online_slowdown, stream_slowdown)


def texts(made: Objective) -> list[str]:
    return [format_slo(slo) for slo in made.slos]


def test_first_tokens_are_a_tenth_slower_and_streams_twice_as_slow_by_default() -> None:
    assert (ONLINE_SLOWDOWN, STREAM_SLOWDOWN) == (0.1, 1.0)
    assert texts(objective()) == ["ttft p99 <= +10%"]
    assert objective().stream_slowdown == 1.0


@pytest.mark.parametrize("policy", [policy for policy in OFFLINE_POLICIES if policy != "coserve"])
def test_other_policies_keep_only_the_targets_they_are_given(policy: str) -> None:
    assert objective(policy=policy) == Objective()
    given = objective("tbt p99 <= 50ms", policy=policy, online_slowdown=0.2, stream_slowdown=0.5)
    assert texts(given) == ["tbt p99 <= 50ms", "ttft p99 <= +20%"]
    assert given.stream_slowdown == 0.5


@pytest.mark.parametrize(
    ("slos", "expected"),
    [
        (["ttft p50 <= 300ms"], ["ttft p50 <= 300ms"]),
        (["ttft p99 <= +50%"], ["ttft p99 <= +50%"]),
        (["tpot mean <= 50ms"], ["tpot mean <= 50ms", "ttft p99 <= +10%"]),
        (["tbt p99 <= 50ms", "ttft p99 <= 1s"], ["tbt p99 <= 50ms", "ttft p99 <= 1000ms"]),
    ],
)
def test_a_ttft_target_replaces_the_default_slowdown_of_first_tokens(
    slos: list[str], expected: list[str]
) -> None:
    assert texts(objective(*slos)) == expected


def test_a_slowdown_that_was_asked_for_holds_beside_targets() -> None:
    both = objective("ttft p99 <= 1s", online_slowdown=0.25)
    assert texts(both) == ["ttft p99 <= 1000ms", "ttft p99 <= +25%"]


def test_a_slowdown_of_zero_is_no_default() -> None:
    none = objective(online_slowdown=0.0, stream_slowdown=0.0)
    assert texts(none) == ["ttft p99 <= +0%"]
    assert none.stream_slowdown == 0.0


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (
            objective(),
            "First tokens within 10% of what they take alone (P99), streams at no less than half "
            "of their speed alone.",
        ),
        (
            objective("ttft p99 <= 500ms", "tbt p99 <= 50ms"),
            "First tokens at most 500 ms (P99), gaps between tokens at most 50 ms (P99).",
        ),
        (
            objective("tpot mean <= 12.5ms", stream_slowdown=0.25),
            "First tokens within 10% of what they take alone (P99), mean gaps of streams at most "
            "12.5 ms (mean).",
        ),
        (
            objective("tbt p90 <= +250%", "ttft p50 <= 2s"),
            "First tokens at most 2,000 ms (P50), gaps between tokens at most 3.5 times what they "
            "take alone (P90).",
        ),
        (
            objective(online_slowdown=0.125, stream_slowdown=0.25),
            "First tokens within 12.5% of what they take alone (P99), streams at no less than 80% "
            "of their speed alone.",
        ),
        (
            objective(online_slowdown=0.0, stream_slowdown=0.0),
            "First tokens no later than alone (P99), streams at no less than their speed alone.",
        ),
        (
            objective("tpot p99 <= +0%", policy="ooco"),
            "Mean gaps of streams no longer than alone (P99).",
        ),
        (objective(policy="conserve"), "No latency, since online requests have no targets."),
    ],
)
def test_the_promise_is_a_sentence_without_the_pace_where_a_target_replaces_it(
    made: Objective, sentence: str
) -> None:
    assert made.sentence() == sentence


def test_conversations_are_in_the_sentence_where_they_are_kept() -> None:
    assert objective().sentence(keeps_conversations=True) == (
        "First tokens within 10% of what they take alone (P99), streams at no less than half of "
        "their speed alone, conversations stay cached."
    )
    without_targets = objective(policy="conserve").sentence(keeps_conversations=True)
    assert without_targets == "Conversations stay cached."


def test_targets_for_gaps_replace_the_slowdown_of_streams() -> None:
    assert objective().bounds_streams
    assert objective("ttft p99 <= 1s").bounds_streams
    assert not objective("tbt p99 <= 50ms", stream_slowdown=0.5).bounds_streams
    assert not objective(policy="conserve").bounds_streams


@pytest.mark.parametrize(
    ("text", "fraction"),
    [("10%", 0.1), (" 12.5 %", 0.125), ("0%", 0.0), ("250%", 2.5), ("7.%", 0.07)],
)
def test_a_percentage_becomes_a_fraction(text: str, fraction: float) -> None:
    assert parse_slowdown(text, "--flag") == pytest.approx(fraction)


@pytest.mark.parametrize("text", ["", "10", "+10%", "-5%", "ten%", "1e3%", "nan%", "10%%", "٣%"])
def test_anything_but_a_percentage_is_refused_with_the_name_of_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--flag must be a percentage such as 10%, got"):
        parse_slowdown(text, "--flag")
