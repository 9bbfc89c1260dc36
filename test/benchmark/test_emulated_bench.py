"""Traffic of traces, the figures of ``bench_emulated``, and the papers' effects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from emulated_bench import effects
from emulated_bench.effects import EFFECTS
from emulated_bench.figures import full_rate_per_s, row
from interference_bench.load import TRAFFIC, Load
from interference_bench.outcome import LiveRequest, RunOutcome, outcome_of
from interference_bench.traces import CONTEXT_TOKENS, TRACES, TraceTraffic, fit_of, traffic_of
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import Outcome, RequestTimeline, SloTargets
from sglang_coserve.srt.emulation.settings import Emulation

TARGETS = {"1.2 × alone": SloTargets(0.2, 0.02), "given": SloTargets(0.5, 0.05)}


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[TraceTraffic]:
    """40 requests, two in each second, of which all share their first block."""
    rows = [
        {
            "timestamp": 500 * number,
            "input_length": 40_000 if number == 1 else 600,
            "output_length": 10,
            "hash_ids": [7, 100 + number],
        }
        for number in range(40)
    ]
    path = tmp_path / str(TRACES["mooncake-conversation"])
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    yield traffic_of("mooncake-conversation", tmp_path)


def test_a_piece_of_a_trace_comes_at_the_rate_asked_for(recorded: TraceTraffic) -> None:
    requests = recorded.requests(rate_per_s=8.0, seconds=2.0, seed=0)
    assert len(requests) == 16
    assert [one.arrival_s for one in requests] == pytest.approx([n / 8 for n in range(16)])
    later = recorded.requests(rate_per_s=8.0, seconds=2.0, seed=1)
    assert later[0].arrival_s == 0.0
    assert later[0].index > 0


def test_prompts_share_what_the_trace_says(recorded: TraceTraffic) -> None:
    first, _, third = [*recorded.arrivals(4.0, 1.0, 0, 2000)][:3]
    assert first.prompt[:512] == third.prompt[:512]
    assert first.prompt[512:] != third.prompt[512:]
    assert min(first.prompt) >= 10


def test_too_long_prompts_are_cut_and_counted(recorded: TraceTraffic) -> None:
    assert f", 1 cut to {CONTEXT_TOKENS} tokens" in str(fit_of(recorded))
    longest = recorded.requests(4.0, 1.0, 0)[1]
    assert longest.prompt_tokens + longest.output_tokens == CONTEXT_TOKENS


def test_what_a_trace_has_not_is_said(recorded: TraceTraffic, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="40 requests, and from number 5 on not 99"):
        recorded.requests(99.0, 1.0, seed=1)
    with pytest.raises(ConfigError, match=r"azure-conversation needs .*AzureLLM"):
        traffic_of("azure-conversation", tmp_path)


@pytest.mark.parametrize("name", ["azure-code-like", "burstgpt-like"])
def test_made_traffic_has_the_published_mean(name: str, tmp_path: Path) -> None:
    requests = traffic_of(name, tmp_path).requests(100.0, 50.0, seed=3)
    assert len(requests) == pytest.approx(5000, rel=0.15)
    mean = sum(one.prompt_tokens for one in requests) / len(requests)
    assert mean == pytest.approx({"azure-code-like": 2048, "burstgpt-like": 2747}[name], rel=0.05)


def outcome(**values: Any) -> RunOutcome:
    online = [
        RequestTimeline("a", 0.0, (ttft_s, ttft_s + gap_s), 10)
        for ttft_s, gap_s in ((0.1, 0.01), (0.3, 0.01), (0.3, 0.06))
    ]
    refused = RequestTimeline("b", 0.0, (), 10, outcome=Outcome.FAILED)
    given = {"host_s": 0.3, "num_steps": 100, "num_suspended": 2, **values}
    return RunOutcome([*online, refused], 10.0, **{"offline_tokens_per_s": 2000.0, **given})


def test_a_request_that_was_refused_keeps_no_target() -> None:
    found = row(outcome(), TARGETS)
    assert found["attained"] == {"1.2 × alone": 0.25, "given": 0.5}
    assert found["offline_tokens_per_s"] == 2000
    assert found["host_ms_per_step"] == pytest.approx(3.0)
    assert found["preemptions_per_online_request"] == 0.5
    assert row(outcome(), {"": SloTargets()})["attained"] == {"": 0.75}
    assert found["normalized_ms"] == pytest.approx(1e3 * (0.11 / 2 + 0.31 / 2 + 0.36 / 2) / 3)


def test_a_row_has_the_gaps_of_requests_and_what_online_prompts_found_cached() -> None:
    found = row(outcome(online_from_cache=0.9), {})
    assert found["tpot_p50_ms"] == pytest.approx(10.0)
    assert found["tpot_p99_ms"] == pytest.approx(59.0)
    assert found["e2e_p50_ms"] == pytest.approx(310.0)
    assert found["online_from_cache"] == 0.9


def test_cached_tokens_of_online_requests_are_a_share_of_their_prompts() -> None:
    cold, warm = (LiveRequest(0.0, 1000, is_offline=False) for _ in range(2))
    cold.times_s = warm.times_s = [1.0]
    cold.prefilled, warm.prefilled = [(False, 1000)], [(False, 200)]
    found = outcome_of([cold, warm], 0.0, 10.0, num_online=2)
    assert found.online_from_cache == pytest.approx(0.4)


def test_what_prefixes_saved_and_what_was_computed_again_are_shares_of_prompts() -> None:
    whole, half, again, waits = (LiveRequest(0.0, 1000, is_offline=True) for _ in range(4))
    for live in (whole, half, again):
        live.times_s = [1.0, 2.0]
    whole.prefilled = [(False, 600), (False, 400)]
    half.prefilled = [(False, 500)]
    again.prefilled = [(False, 700), (False, 1000), (True, 550)]
    waits.prefilled = [(False, 600)]
    found = outcome_of([whole, half, again, waits], 0.0, 10.0, num_online=0)
    assert found.from_prefixes == pytest.approx(500 / 3000)
    assert found.recomputed == pytest.approx((700 + 550) / 3000)


def test_full_load_keeps_the_device_busy(tmp_path: Path) -> None:
    emulation = Emulation.of("llama-3.1-8b", "h100")
    traffic = traffic_of("azure-code-like", tmp_path)
    at_once = traffic.requests(300.0, 1.0, 0)
    rate_per_s = full_rate_per_s(emulation, at_once)
    mean = sum(one.prompt_tokens for one in at_once) / len(at_once)
    prompt_s = emulation.latency_model().predict(StepStats.of([(round(mean), 0)]))
    assert 0.5 / prompt_s < rate_per_s < 1 / prompt_s


def test_an_effects_targets_are_those_of_its_first_system_scaled_if_it_says_so() -> None:
    effect = EFFECTS["hygen_loads"]
    assert effect.system("gaps +5%", effect.targets_of([])).coserve == {
        "offline_policy": "hygen",
        "slo": (),
    }
    targets = effect.targets_of([{"ttft_p99_ms": 100.0, "itl_p99_ms": 20.0}])
    system = effect.system("gaps +5%", targets)
    assert system.coserve["slo"] == ("ttft p99 <= 105.000ms", "tbt p99 <= 21.000ms")
    assert system.flags["max_total_tokens"] == 42_000


def test_the_stored_effects_are_all_there_and_the_table_is_made_of_them() -> None:
    folder = Path(__file__).parents[2] / "benchmark/results/emulated/effects"
    loads = {path.stem: json.loads(path.read_text())["loads"] for path in folder.glob("*.json")}
    for name, effect in EFFECTS.items():
        assert list(loads[name]) == list(effect.loads)
        for rows in loads[name].values():
            assert [one["system"] for one in rows] == list(effect.systems)
    assert (
        effects.table({name: loads[name] for name in EFFECTS}) in (folder / "table.md").read_text()
    )


@pytest.mark.parametrize("shared", [0.5, 0.8])
def test_offline_prompts_begin_with_a_prefix_of_the_length_asked_for(shared: float) -> None:
    load = Load(
        TRAFFIC["outputs"], 1.0, 1.0, 0, 100, 2, 4, offline_prefixes=1, offline_shared=shared
    )
    first, second = islice(load.offline_prompts(2000), 2)
    same = int(100 * shared)
    assert first[:same] == second[:same]
    assert first[same:] != second[same:]
    assert len(first) == 100
