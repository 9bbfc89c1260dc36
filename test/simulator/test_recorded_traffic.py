"""The traffic of a recording, exported and simulated again.

The recording is of a simulated engine here, so what simulating it again should give is known.
"""

from __future__ import annotations

import json
import math
import random
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.scheduler.scenarios import MODEL
from sglang_coserve.cli import app
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.slo import deadlines
from sglang_coserve.core.latency_model.profile import LatencyProfile
from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot, Request
from sglang_coserve.core.step import StepPlan, StepResult
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import InputFileError
from sglang_coserve.metrics import RequestTimeline, SloTargets, latency_report
from sglang_coserve.profiler.fits import load_profile
from sglang_coserve.recording.calls import (
    Arrived,
    Finished,
    OfflineAdded,
    Planned,
    RecordingScheduler,
    SchedulerSetup,
    Updated,
)
from sglang_coserve.recording.file import EventEncoder, encode_setup
from sglang_coserve.simulator.binding import TrafficSource
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.recorded_traffic import RecordedTraffic
from sglang_coserve.workload.trace import read_trace
from simulator.engines import offline, online

SIZE = EngineSize(chunk_tokens=512, max_requests=32, kv_tokens=20_000)
SETUP = SchedulerSetup(
    "coserve",
    deadlines(SloTargets(1.0, 0.1)),
    SchedulerConfig(),
    LatencyProfile(MODEL, None, "h100", "llama-3.1-8b", 1, "0.5.17"),
    SIZE,
)
BEGAN_S = 5000.0


def recorded(num_offline: int = 150) -> tuple[list[str], list[RequestTimeline], int]:
    """A recording of half a minute; its online timelines and its offline tokens."""
    rng = random.Random(5)
    requests = []
    at_s = BEGAN_S
    for number in range(60):
        at_s += rng.expovariate(2)
        requests.append(online(f"on{number}", rng.randint(20, 300), rng.randint(2, 40), at_s))
    requests += [
        offline(f"off{n}", rng.randint(100, 400), rng.randint(5, 40), BEGAN_S + n / 10)
        for n in range(num_offline)
    ]
    requests.sort(key=lambda request: request.info.arrival_s)
    encoder = EventEncoder()
    lines = [encode_setup(SETUP)]
    scheduler = RecordingScheduler(SETUP.make(), lambda event: lines.append(encoder.encode(event)))
    config = ExecutorConfig(
        kv_capacity_tokens=SIZE.kv_tokens,
        page_tokens=1,
        max_running_requests=SIZE.max_requests,
        max_batch_tokens=SIZE.chunk_tokens,
    )
    engine = SimEngine(scheduler, SimulatedExecutor(config, MODEL), TrafficSource([requests]))  # type: ignore[arg-type]
    while engine.step(math.inf):
        pass
    timelines = [request.timeline() for request in requests if request.info.is_online]
    tokens = sum(r.info.prompt_tokens + r.output_tokens for r in requests if not r.info.is_online)
    return lines, timelines, tokens


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_exported_traffic_is_simulated_as_it_was(tmp_path: Path) -> None:
    lines, timelines, tokens = recorded()
    plans, traffic, report = tmp_path / "plans.jsonl", tmp_path / "traffic", tmp_path / "report"
    plans.write_text("".join(lines))
    _, command = run("replay", str(plans), "--export", str(traffic)).splitlines()
    program, *flags = shlex.split(command)
    assert program == "coserve" and flags[-2:] == ["-o", "recorded"]
    run(*flags[:-1], str(report), "--quiet")
    (result,) = json.loads((report / "report.json").read_text())["results"]
    expected = latency_report(timelines)
    found = result["online"]["latency"]
    assert found["finished"] == expected.finished == 60
    assert found["ttft_ms"]["p99"] == pytest.approx((expected.ttft.p99_s or 0) * 1e3, rel=0.1)
    assert found["itl_ms"]["p99"] == pytest.approx((expected.itl.p99_s or 0) * 1e3, rel=0.1)
    served = result["offline"]["throughput"]["total_tokens_per_s"] * result["interval_s"]
    assert served == pytest.approx(tokens, rel=0.02)
    assert load_profile(traffic / "profile.json").model == "llama-3.1-8b"


def test_offline_prompts_share_what_they_shared(tmp_path: Path) -> None:
    encoder = EventEncoder()
    lines = [encode_setup(SETUP)]
    recorder = RecordingScheduler(SETUP.make(), lambda event: lines.append(encoder.encode(event)))
    shared = list(range(600))
    for number in range(2):
        prompt = pack_tokens([*shared, *[1000 + number] * 600])
        recorder.add_offline(QueuedRequest(f"off{number}", prompt, BEGAN_S + 1 + number, 8))
    recorder.arrived(online("on", 50, 8, BEGAN_S).info)
    RecordedTraffic(lines, "plans.jsonl").export(tmp_path)
    assert [r.arrival_s for r in read_trace(tmp_path / "online.jsonl")] == [0, 0]
    start, first, second = read_trace(tmp_path / "offline.jsonl")
    assert (start.prompt_tokens, first.arrival_s, second.arrival_s) == (0, 1.0, 2.0)
    assert (first.prompt_tokens, first.output_tokens) == (1200, 8)
    assert len(first.hash_ids) == len(second.hash_ids) == 2
    assert first.hash_ids[0] == second.hash_ids[0] and first.hash_ids[1] != second.hash_ids[1]


def test_settings_of_the_server_become_flags_or_are_named(tmp_path: Path) -> None:
    config = SchedulerConfig(step_prefill_tokens=64, iteration_budget_s=0.02, refine=True)
    made_of = replace(SETUP, policy="hygen", config=config)
    arrived = Arrived(online("on", 50, 8, BEGAN_S).info)
    plans = tmp_path / "plans.jsonl"
    plans.write_text(encode_setup(made_of) + EventEncoder().encode(arrived))
    head, command = run("replay", str(plans), "--export", str(tmp_path)).splitlines()
    assert head == "as recorded, but for iteration_budget_s:"
    assert "--policy hygen --step-prefill-tokens 64 " in command


def test_the_machine_of_the_server_becomes_flags(tmp_path: Path) -> None:
    size = replace(SIZE, kv_tokens=100_000, overlaps=True)
    seen = EngineSnapshot(0.0, (), (), 0, 0, 0, 0, page_tokens=16, stop_share=0.25)
    seen = replace(seen, keeps_prefixes=False)
    encoder, plans = EventEncoder(), tmp_path / "plans.jsonl"
    events = [Arrived(online("on", 50_000, 8, BEGAN_S).info), Planned(seen, {}, StepPlan())]
    lines = [encode_setup(replace(SETUP, engine=size)), *map(encoder.encode, events)]
    plans.write_text("".join(lines))
    _, command = run("replay", str(plans), "--export", str(tmp_path)).splitlines()
    machine = "--safepoint-layers 8 --checkpoint-gb-s 0 --no-prefix-cache --overlap "
    assert "--page-tokens 16 " in command and machine in command
    run(*shlex.split(command)[1:-1], str(tmp_path), "--quiet", "--event-log")
    log = (tmp_path / "events-coserve.jsonl").read_text()
    assert '"prompt_tokens":50000' in log
    loading = encoder.encode(Planned(seen, {"off": None}, StepPlan()))
    assert "--checkpoint-gb-s" not in RecordedTraffic([*lines, loading], "plans").export(tmp_path)


@pytest.mark.parametrize(("last_token_s", "output_tokens"), [(BEGAN_S, 6), (None, 5)])
def test_a_token_under_way_at_the_last_plan_is_the_last(
    tmp_path: Path, last_token_s: float | None, output_tokens: int
) -> None:
    info = offline("off", 50, 64, BEGAN_S).info
    running = Request(info, RequestState.DECODING, 5, 54, last_token_s=last_token_s)
    events = [
        OfflineAdded(QueuedRequest("off", pack_tokens(range(50)), BEGAN_S, 64)),
        Planned(EngineSnapshot(BEGAN_S, [running], (), 0, 0, 0, 0), {}, StepPlan()),
        Finished("off"),
    ]
    lines = [encode_setup(SETUP), *map(EventEncoder().encode, events)]
    RecordedTraffic(lines, "plans.jsonl").export(tmp_path)
    _, request = read_trace(tmp_path / "offline.jsonl")
    assert request.output_tokens == output_tokens


def test_the_profile_learns_nothing_of_suspended_steps(tmp_path: Path) -> None:
    """As on the server: their times include what suspending them cost."""
    step = StepResult(None, BEGAN_S, 1.0, StepStats.of(decodes=[10]), suspensions=1)
    events = [Arrived(online("on", 50, 8, BEGAN_S).info), *[Updated(step)] * 64]
    lines = [encode_setup(SETUP), *map(EventEncoder().encode, events)]
    RecordedTraffic(lines, "plans.jsonl").export(tmp_path)
    assert load_profile(tmp_path / "profile.json").latency_model == MODEL


def test_what_has_no_traffic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no request is in it"):
        RecordedTraffic([encode_setup(SETUP)], "plans.jsonl")
    with pytest.raises(InputFileError, match="cannot be read"):
        run("replay", str(tmp_path / "none.jsonl"), "--export", str(tmp_path / "traffic"))
