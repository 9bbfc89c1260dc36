"""A real scheduler on an emulated GPU: what only happens where host and device run beside each
other. Host work takes no time, so that every run is the same."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from common.own_process import OwnProcess
from interference_bench.load import Load, OnlineTraffic
from interference_bench.outcome import RunOutcome
from interference_bench.systems import EngineSystem
from sglang_coserve.bench_serving import stock
from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.srt.emulation.model_directory import make_emulated_model
from sglang_coserve.srt.emulation.settings import Emulation
from srt.emulation.observed_engine import Given, Observed, ObservedEngine

EMULATED = Emulation.of("llama-3.1-8b", "h100", noise=0.0)
FLAGS = {"max_total_tokens": 16384, "max_running_requests": 24, "chunked_prefill_size": 2048}
LOAD = Load(
    OnlineTraffic((256, 1024), (8, 24)),
    rate_per_s=4.0,
    seconds=4.0,
    seed=0,
    offline_prompt_tokens=3000,
    offline_output_tokens=64,
    offline_in_flight=8,
)
BUSY = replace(LOAD, rate_per_s=24.0, seconds=3.0, seed=4)
RESUME_S = 0.003
Seen = tuple[RunOutcome, Observed]


class OurRuns(NamedTuple):
    """Two runs on ours."""

    usual: Seen
    """The load, where going on with a suspended step takes the device a while."""

    learned_resume_s: float
    """What a suspension costs, as the core learned from it."""

    with_graphs: Seen
    """More requests, some of which are aborted while their step is suspended. The scheduler need
    not wait for the end of a pass, as with CUDA graphs."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("emulated")
    return make_emulated_model(directory, EMULATED, vocab=1024, context=4096)


@pytest.fixture(scope="module")
def latency_model() -> LatencyModel:
    return EMULATED.latency_model()


@pytest.fixture(scope="module")
def stock_runs(model: Path) -> list[Seen]:
    """The same load twice on stock SGLang."""
    with OwnProcess(ObservedEngine, EngineSystem(flags=stock.tuned(2048)), model, FLAGS) as engine:
        return [engine.call("observed_run", LOAD, timeout_s=200.0) for _ in range(2)]


@pytest.fixture(scope="module")
def our_system(tmp_path_factory: pytest.TempPathFactory) -> EngineSystem:
    """Ours, which knows how long steps take, and copies KV to the host."""
    profile = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.write_text(json.dumps(EMULATED.profile))
    coserve = {
        "offline_policy": "coserve",
        "latency_profile": str(profile),
        "kv_checkpoint": "eager",
    }
    return EngineSystem(coserve=coserve, takes_slo=True)


@pytest.fixture(scope="module")
def our_runs(model: Path, our_system: EngineSystem) -> OurRuns:
    with OwnProcess(ObservedEngine, our_system, model, FLAGS) as engine:
        usual = engine.call("observed_run", LOAD, Given(resume_s=RESUME_S), timeout_s=200.0)
        learned_s = engine.call("learned_resume_s", 1.0)
        given = Given(reads_early=True, aborts_suspended=True, runs_ahead=True)
        return OurRuns(usual, learned_s, engine.call("observed_run", BUSY, given, timeout_s=200.0))


@pytest.fixture
def ours(our_runs: OurRuns) -> Seen:
    return our_runs.usual


def test_runs_repeat_exactly(stock_runs: list[Seen]) -> None:
    (first, seen), (again, seen_again) = stock_runs
    assert first.num_unfinished == 0
    assert len(first.online) > 8
    for one, same in zip(first.online, again.online, strict=True):
        assert same.ttft_s == pytest.approx(one.ttft_s, abs=1e-6)
        assert same.itls_s == pytest.approx(one.itls_s, abs=1e-6)
    assert again.offline_tokens_per_s == pytest.approx(first.offline_tokens_per_s)
    assert [*seen.outputs.values()] == [*seen_again.outputs.values()]


def test_the_host_launches_steps_while_the_device_computes_the_last(
    stock_runs: list[Seen],
) -> None:
    _, seen = stock_runs[0]
    assert seen.passes_ahead > 0.8 * seen.passes
    work = [one for one in seen.work if one.stream == "forward"]
    assert all(one.end_s <= after.begin_s + 1e-9 for one, after in pairwise(work))


@pytest.mark.parametrize("is_ours", [False, True])
def test_without_overlap_the_host_waits_for_each_step(
    model: Path, latency_model: LatencyModel, is_ours: bool
) -> None:
    flags = {**FLAGS, "disable_overlap_schedule": True}
    coserve = {"offline_policy": "coserve"} if is_ours else None
    system = EngineSystem(coserve=coserve, takes_slo=is_ours)
    with OwnProcess(ObservedEngine, system, model, flags) as engine:
        outcome, seen = engine.call("observed_run", LOAD, timeout_s=200.0)
    assert outcome.num_unfinished == 0
    assert seen.passes > 100
    assert seen.passes_ahead == 0
    assert min(one.ttft_s for one in outcome.online) > latency_model.predict(
        StepStats.of([(256, 0)], [])
    )


def test_steps_with_offline_work_are_planned_at_the_last_moment(
    stock_runs: list[Seen], our_runs: OurRuns
) -> None:
    """Planning and launching take no time here, and the model knows what steps take."""
    _, ours = our_runs.usual
    _, unpaced = our_runs.with_graphs
    _, stock = stock_runs[0]
    ahead_s = np.percentile(stock.beside_s, 50)
    assert np.percentile(unpaced.beside_s, 90) > ahead_s / 4
    assert len(ours.beside_s) > 20
    assert np.percentile([abs(one_s) for one_s in ours.beside_s], 90) < ahead_s / 10


def test_where_launches_wait_for_the_step_before_nobody_waits_for_them(
    stock_runs: list[Seen], our_system: EngineSystem, tmp_path: Path
) -> None:
    """As with FlashInfer: the wait is no work of the host, which has sent first tokens before."""
    emulation = replace(EMULATED, prefill_launch_s=0.007)
    model = make_emulated_model(tmp_path / "model", emulation, vocab=1024, context=4096)
    with OwnProcess(ObservedEngine, our_system, model, FLAGS) as engine:
        _, seen = engine.call("observed_run", LOAD, timeout_s=200.0)
    assert len(seen.first_late_s) > 8
    assert max(seen.first_late_s) < 0.001
    _, stock = stock_runs[0]
    assert len(seen.beside_s) > 20
    most_s = np.percentile([abs(one_s) for one_s in seen.beside_s], 90)
    assert most_s < np.percentile(stock.beside_s, 50) / 10


def test_memory_that_a_pass_reads_is_kept_from_the_scheduler(
    stock_runs: list[Seen], ours: Seen
) -> None:
    """Of a pass that was suspended, too."""
    for _, seen in (stock_runs[0], ours):
        assert seen.barriers == seen.passes
        assert not seen.open_barriers


def test_outputs_do_not_depend_on_the_batches(stock_runs: list[Seen], ours: Seen) -> None:
    _, stock_seen = stock_runs[0]
    online = {rid: tokens for rid, tokens in ours[1].outputs.items() if "online-" in rid}
    assert online
    for rid, tokens in online.items():
        assert stock_seen.outputs[rid] == tokens
    assert len({tuple(tokens[:4]) for tokens in online.values()}) > len(online) / 2


def test_steps_get_the_times_that_the_device_took(ours: Seen, latency_model: LatencyModel) -> None:
    """Not those of the passes in which the host launched them, or learned of them."""
    known = [one for one in ours[1].results if one.seconds is not None and not one.suspensions]
    exact = [
        one
        for one in known
        if one.seconds == pytest.approx(latency_model.predict(one.batch), rel=0.01)
    ]
    assert len(known) > 100
    assert len(exact) > 0.9 * len(known)


def test_suspended_steps_get_the_times_of_their_parts_and_suspensions_their_cost(
    our_runs: OurRuns, latency_model: LatencyModel
) -> None:
    """Which the latency model need not learn, nor anybody assume."""
    _, seen = our_runs.usual
    known = [one for one in seen.results if one.seconds is not None and one.suspensions]
    assert len(known) > 4
    for one in known:
        cost_s = one.suspensions * RESUME_S
        assert one.seconds == pytest.approx(latency_model.predict(one.batch) + cost_s, rel=0.01)
    assert our_runs.learned_resume_s == pytest.approx(RESUME_S, rel=0.02)


def test_a_step_before_online_decodes_stops_in_time(ours: Seen) -> None:
    """Counted in what the device runs: with the groups that are in flight when the host stops."""
    _, seen = ours
    until = [one for one in seen.suspensible if one.until_s < math.inf]
    assert len(until) > 4
    for one in until:
        # A group always runs, and the host learns how long one takes while the next one does.
        least_s = one.begin_s + RESUME_S + 2 * one.group_s
        assert one.free_s <= max(one.until_s, least_s) + 1e-4


def test_an_arrival_suspends_a_step_that_is_launched_ahead(
    ours: Seen, latency_model: LatencyModel
) -> None:
    safepoints = ours[1].safepoints
    assert sum(safepoints["suspended"].values()) > 0, (ours[0].counters, safepoints)
    assert safepoints["resumed"] > 0
    delays_ms = safepoints["delays_ms"]["arrival_to_stop"]
    longest = max(ours[1].results, key=lambda one: latency_model.predict(one.batch))
    group_ms = latency_model.predict(longest.batch) * 1e3 * safepoints["interval_layers"] / 32
    # The host is never further ahead than the two groups in flight.
    assert delays_ms["p50"] <= 2 * group_ms


def test_copies_of_kv_run_beside_the_passes(ours: Seen) -> None:
    _, seen = ours
    assert seen.checkpoints["checkpointed_tokens"] > 0
    passes = [one for one in seen.work if one.stream == "forward"]
    copies = [one for one in seen.work if one.stream == "to host" and one.end_s > one.begin_s]
    assert copies
    beside = [
        copy
        for copy in copies
        if any(one.begin_s < copy.end_s and copy.begin_s < one.end_s for one in passes)
    ]
    assert beside


def test_kv_is_copied_only_when_the_passes_before_have_written_it(ours: Seen) -> None:
    _, seen = ours
    copies = [one for one in seen.work if one.stream == "to host" and one.end_s > one.begin_s]
    assert all(one.begin_s >= one.forward_free_s - 1e-9 for one in copies)


def test_kv_is_loaded_only_when_the_passes_in_flight_have_left_its_slots(
    our_runs: OurRuns,
) -> None:
    """They may still write to slots that were freed, though the scheduler went on."""
    _, seen = our_runs.with_graphs
    assert seen.open_barriers
    loads = [one for one in seen.work if one.stream == "to device" and one.end_s > one.begin_s]
    assert all(one.begin_s >= one.forward_free_s - 1e-9 for one in loads)
    # Or nothing was to be waited for.
    assert any(one.begin_s <= one.forward_free_s + 1e-9 for one in loads)


def test_what_follows_a_dropped_step_waits_for_its_part_in_flight(our_runs: OurRuns) -> None:
    _, seen = our_runs.with_graphs
    assert seen.drops_in_flight
    assert not seen.open_drops
