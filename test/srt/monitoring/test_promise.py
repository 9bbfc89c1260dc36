"""The promise of a real server to online requests, and the figures that show how it is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from calls import call
from sglang_coserve.core.control.objective import Objective
from srt.batch_server.deployment import API_KEY
from srt.monitoring.watched import ONLINE_REQUESTS, ONLINE_TOKENS, Watched
from waiting import eventually

PROMISE = Objective.of("coserve", ()).sentence(keeps_conversations=True)
TURN_TOKENS = 400


def test_the_log_has_the_promise_once(watched: Watched) -> None:
    log = watched.deployment.log.read_text()
    assert log.count(f"the promise to online requests: {PROMISE}\n") == 1
    assert "conversations stay cached" in PROMISE


def test_status_and_view_have_the_promise(watched: Watched) -> None:
    assert watched.status_afterwards["promise"] == PROMISE
    assert watched.get("/coserve/view").json()["online_users"]["promise"] == PROMISE


def test_every_latency_is_there_beside_alone(watched: Watched) -> None:
    latencies = watched.status_afterwards["slo"]["latencies"]
    seen_s = {
        "ttft": [one.ttft_s for one in watched.online],
        "tpot": [np.mean(one.gaps_s) for one in watched.online],
        "tbt": [gap_s for one in watched.online for gap_s in one.gaps_s],
        "e2e": [one.ttft_s + sum(one.gaps_s) for one in watched.online],
    }
    assert latencies.keys() == seen_s.keys()
    for name, compared in latencies.items():
        # The server warms up with requests of its own.
        gaps = ONLINE_TOKENS - 1 if name == "tbt" else 1
        assert ONLINE_REQUESTS * gaps <= compared["values"] <= (ONLINE_REQUESTS + 64) * gaps
        measured_ms, alone_ms = compared["measured_ms"], compared["online_alone_ms"]
        assert 0 < measured_ms["p50"] < 2e3 * np.median(seen_s[name]) + 20, name
        for statistic, ratio in compared["ratio"].items():
            assert ratio == pytest.approx(measured_ms[statistic] / alone_ms[statistic])
        samples = watched.samples_afterwards
        labels = frozenset({("latency", name), ("statistic", "p50")})
        for metric in ("seconds", "alone_seconds", "ratio"):
            assert samples[f"coserve_online_latency_{metric}", labels] > 0


def test_streams_are_compared_one_by_one(watched: Watched) -> None:
    streams = watched.status_afterwards["slo"]["streams"]
    assert streams["streams"] >= ONLINE_REQUESTS
    assert streams["limit"] == 2.0
    assert 0 <= streams["kept_share"] <= 1
    assert streams["met"] == (streams["kept_share"] >= 0.99)
    assert 0 < streams["slowdown"]["p50"] <= streams["slowdown"]["p99"]


def cache_of(watched: Watched) -> dict[str, Any]:
    return watched.status()["cache"]


def test_a_conversation_finds_its_turns_in_both_caches(watched: Watched) -> None:
    """With nothing else to evict them: all that would be found alone."""
    before = cache_of(watched)
    tokens = [10 + place % 90 for place in range(TURN_TOKENS)]
    for number in range(1, 4):
        body = {
            "input_ids": tokens[: number * TURN_TOKENS // 4],
            "sampling_params": {"max_new_tokens": 2, "ignore_eos": True},
        }
        call(watched, "POST", "/generate", API_KEY, json=body).raise_for_status()
    prompts = [number * TURN_TOKENS // 4 for number in range(1, 4)]

    def gained() -> dict[str, int] | None:
        after = cache_of(watched)
        found = {name: after[name] - before[name] for name in ("found", "found_alone")}
        prompt_tokens = after["online_prompt_tokens"] - before["online_prompt_tokens"]
        return found if prompt_tokens == sum(prompts) else None

    found = eventually(gained)
    assert found["found"] == pytest.approx(sum(prompts[:-1]), abs=len(prompts))
    assert found["found_alone"] == pytest.approx(sum(prompts[:-1]), abs=len(prompts))
    assert cache_of(watched)["lease_s"] > 0
    assert cache_of(watched)["protected_tokens"] >= 0
    shown = watched.get("/coserve/view").json()
    assert shown["online_users"]["cache"]["is_promised"]
    assert {"online_found_tokens", "online_found_alone_tokens"} <= shown["history"].keys()
