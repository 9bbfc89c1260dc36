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
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.errors import InputFileError
from sglang_coserve.metrics import RequestTimeline, SloTargets, latency_report
from sglang_coserve.profiler.fits import load_profile
from sglang_coserve.recording.calls import Arrived, RecordingScheduler, SchedulerSetup
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
    result = CliRunner().invoke(app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_exported_traffic_is_simulated_as_it_was(tmp_path: Path) -> None:
    lines, timelines, tokens = recorded()
    plans, traffic, report = tmp_path / "plans.jsonl", tmp_path / "traffic", tmp_path / "report"
    plans.write_text("".join(lines))
    _, command = run("replay", str(plans), "--export", str(traffic)).splitlines()
    program, *flags = shlex.split(command)
    assert program == "coserve" and flags[-2:] == ["-o", "recorded"]
    run(*flags[:-1], str(report), "--quiet", "--safepoint-layers", "0", "--checkpoint-gb-s", "0")
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


def test_what_has_no_traffic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no request is in it"):
        RecordedTraffic([encode_setup(SETUP)], "plans.jsonl")
    with pytest.raises(InputFileError, match="cannot be read"):
        run("replay", str(tmp_path / "none.jsonl"), "--export", str(tmp_path / "traffic"))
