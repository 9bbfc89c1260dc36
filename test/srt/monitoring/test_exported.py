"""What ``/metrics`` says of a real server under load: all that is documented, and the truth."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from srt.monitoring.watched import LINES, ONLINE_REQUESTS, ONLINE_TOKENS, Watched

PAGE = Path(__file__).parents[3] / "docs" / "prometheus.md"
ELSEWHERE = {
    "coserve_advisory_off",
    "coserve_slo_measured_seconds",
    "coserve_slo_alone_seconds",
    "coserve_slo_attainment",
    "coserve_safepoint_delay_seconds",
    "coserve_safepoint_suspended_total",
    "coserve_safepoint_resumed_total",
}
"""Not there before something happened that this load need not bring."""


def documented() -> list[str]:
    table = PAGE.read_text().partition("## Of a server")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(coserve_\w+)", table, re.MULTILINE)


def value(watched: Watched, name: str, **labels: str) -> float:
    found = [
        amount
        for (sample, has), amount in watched.samples_afterwards.items()
        if sample == name and set(labels.items()) <= has
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def test_every_documented_name_is_scraped_under_load(watched: Watched) -> None:
    names = documented()
    assert len(names) > 25
    scraped = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in watched.samples_afterwards}
    assert set(names) - scraped <= ELSEWHERE


def test_everything_that_is_scraped_is_documented(watched: Watched) -> None:
    scraped = {name for name, _ in watched.samples_afterwards} | {
        name for name, _ in watched.samples_under_load
    }
    bare = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in scraped}
    assert {name for name in bare if name + "_total" not in documented()} <= set(documented())


def test_counts_are_those_of_the_clients(watched: Watched) -> None:
    for metric, online, offline in (
        ("ttft", ONLINE_REQUESTS, LINES),
        ("queue", ONLINE_REQUESTS, LINES),
        ("itl", ONLINE_REQUESTS * (ONLINE_TOKENS - 1), None),
    ):
        name = f"coserve_{metric}_seconds_count"
        # The server warms up with a request of its own.
        assert online <= value(watched, name, request_class="online") <= online + 64
        if offline is not None:
            assert value(watched, name, request_class="offline") == offline
    first = value(watched, "coserve_interference_seconds_count", token="first")
    assert first == value(watched, "coserve_interference_seconds_count", token="last")
    assert first == watched.status_afterwards["online"]["billed"]


def test_times_are_those_of_the_clients(watched: Watched) -> None:
    """The client's are longer, by its own work and the way to it: much, on a busy machine."""
    for metric, seen_s in (
        ("ttft", [one.ttft_s for one in watched.online]),
        ("itl", [gap_s for one in watched.online for gap_s in one.gaps_s]),
    ):
        name = f"coserve_{metric}_seconds"
        total_s = value(watched, f"{name}_sum", request_class="online")
        mean_s = total_s / value(watched, f"{name}_count", request_class="online")
        assert 0 < mean_s < 2 * np.mean(seen_s) + 0.02, metric
    queued_s = value(watched, "coserve_queue_seconds_sum", request_class="online")
    assert queued_s < value(watched, "coserve_ttft_seconds_sum", request_class="online")


def test_loads_are_seen_while_they_last_and_gone_after_that(watched: Watched) -> None:
    def under_load(name: str, **labels: str) -> float:
        return watched.samples_under_load[name, frozenset(labels.items())]

    assert under_load("coserve_batches", state="in_progress") == 1
    assert under_load("coserve_batch_required_tokens_per_second") > 0
    assert value(watched, "coserve_batches", state="in_progress") == 0
    assert value(watched, "coserve_batch_required_tokens_per_second") == 0
    assert value(watched, "coserve_online_outstanding_tokens") == 0
    assert value(watched, "coserve_oldest_waiting_seconds", request_class="offline") == 0
    assert value(watched, "coserve_headroom_tokens_per_second") > 0


def test_prompt_tokens_are_those_of_the_answers(watched: Watched) -> None:
    usage = watched.batch["usage"]
    cached = value(watched, "coserve_prompt_tokens_total", request_class="offline", source="cached")
    computed = value(
        watched, "coserve_prompt_tokens_total", request_class="offline", source="computed"
    )
    assert cached + computed == usage["input_tokens"]
    assert cached == usage["input_tokens_details"]["cached_tokens"]
