"""``--record-plans`` and ``coserve replay``: what the engine decided is decided again."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed
from typer.testing import CliRunner, Result

from core.scheduler.scenarios import MODEL, NO_CACHE, queued, snapshot
from sglang_coserve.cli import app
from sglang_coserve.config import OFFLINE_POLICIES
from sglang_coserve.core.control.slo import deadlines
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.step import Bound
from sglang_coserve.errors import ConfigError, InputFileError
from sglang_coserve.latency_profile import LatencyProfile
from sglang_coserve.metrics import SloTargets
from sglang_coserve.recording.calls import (
    Arrived,
    Finished,
    OfflineAdded,
    Planned,
    RecordedStep,
    SchedulerSetup,
    Started,
    Updated,
    replay,
)
from sglang_coserve.recording.file import encode_setup, encode_step, read_recording
from sglang_coserve.simulator.binding import TrafficSource
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.srt.monitoring.plan_log import recorded
from simulator.engines import offline, online
from srt import test_scheduler as scenarios
from srt.scripted_engine import ScriptedEngine, Spec

SETUP = SchedulerSetup(
    "coserve",
    deadlines(SloTargets(ttft_s=0.3, tpot_s=0.03)),
    SchedulerConfig(),
    LatencyProfile(MODEL, None, "cpu", "small", 1, "0.5.17"),
)


def read(path: Path) -> tuple[SchedulerSetup, list[RecordedStep]]:
    with path.open("rb") as lines:
        setup, steps = read_recording(lines, str(path))
        return setup, list(steps)


# --- On the engine ------------------------------------------------------------------------


PLANNED = {"startup_profile_seconds": 0.0, "slo_ttft_ms": 300.0, "slo_tpot_ms": 30.0}


def mixed_load() -> list[Spec]:
    return scenarios.mixed_specs(seed=13, num_online=15, num_offline=25)


def assert_replays(path: Path, policy: str) -> None:
    setup, steps = read(path)
    assert setup.policy == policy
    assert setup.slos == SETUP.slos
    kinds = {type(call) for step in steps for call in step.calls}
    assert kinds >= {Arrived, OfflineAdded, Started, Updated, Finished}
    assert_each_step_has_a_result(steps)
    replays = list(replay(steps, setup.make()))
    assert len(replays) > 200
    assert [plan.index for plan in replays if plan.differences] == []


def assert_each_step_has_a_result(steps: list[RecordedStep]) -> None:
    """One each, in order, that tells of no more than was admitted."""
    admitted: dict[int, Started] = {}
    planned, done = -1, []
    for step in steps:
        for call in step.calls:
            if isinstance(call, Started):
                admitted[planned] = call
            elif isinstance(call, Updated) and (result := call.result).step is not None:
                done.append(result.step)
                assert set(result.chunks) <= set(admitted[result.step].chunks)
                assert result.dropped or result.batch.prefill_requests == len(result.chunks)
        if step.planned is not None:
            planned = step.planned.plan.step
    assert done == list(range(len(done)))
    # The last one or two may have ended with the run.
    assert len(admitted) - len(done) <= 2


def test_a_server_records_plans_that_replay_to_the_same(start_engine: Any, tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    coserve = {**PLANNED, "offline_policy": "coserve", "record_plans": str(path)}
    process = start_engine(page_size=1, coserve=coserve)
    process.call(scenarios.run_mixed, mixed_load(), 6)
    assert_replays(path, "coserve")


def run_recorded(
    engine: ScriptedEngine, setup: SchedulerSetup, path: Path, specs: list[Spec]
) -> None:
    engine.scheduler.parts.admission.core = recorded(setup, path)
    scenarios.run_mixed(engine, specs, 6)


@pytest.mark.parametrize("policy", OFFLINE_POLICIES)
def test_every_policy_replays_to_the_same_plans(
    start_engine: Any, tmp_path: Path, policy: str
) -> None:
    """On one engine, whose policy is exchanged."""
    coserve = {**PLANNED, "offline_policy": "coserve"}
    process = start_engine(overlap=True, page_size=16, coserve=coserve)
    path = tmp_path / "plans.jsonl"
    setup = replace(SETUP, policy=policy, config=SchedulerConfig(refine=True))
    process.call(run_recorded, setup, path, mixed_load())
    assert_replays(path, policy)


def run_with_a_shrinking_cache(
    engine: ScriptedEngine, setup: SchedulerSetup, path: Path, specs: list[Spec]
) -> None:
    """The cache holds a page less of every prompt than when the step was planned."""
    admission = engine.scheduler.parts.admission
    match = admission.cached_tokens
    admission.cached_tokens = lambda rid: match(rid) + engine.scheduler.page_size
    run_recorded(engine, setup, path, specs)


def test_a_prefill_that_the_cache_made_longer_is_told_as_long_as_it_is(
    start_engine: Any, tmp_path: Path
) -> None:
    coserve = {**PLANNED, "offline_policy": "coserve"}
    process = start_engine(overlap=True, page_size=16, coserve=coserve)
    path = tmp_path / "plans.jsonl"
    process.call(run_with_a_shrinking_cache, SETUP, path, mixed_load())
    assert_replays(path, "coserve")
    _, steps = read(path)
    starts = [call for step in steps for call in step.calls if isinstance(call, Started)]
    planned = {chunk for step in steps if step.planned for chunk in step.planned.plan.prefills}
    assert {chunk for start in starts for chunk in start.chunks} - planned


# --- The file -----------------------------------------------------------------------------


def add_some(path: Path, count: int, **settings: Any) -> int:
    """Record ``count`` steps, each with an arrival; return how many requests wait afterwards."""
    scheduler = recorded(SETUP, path, **settings)
    for number in range(count):
        scheduler.add_offline(queued(50, rid=f"q{number}"))
        scheduler.plan(snapshot(), NO_CACHE)
    return len(scheduler.queue)


def test_a_plan_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    scheduler = recorded(SETUP, path)
    scheduler.add_offline(queued(50, rid="q"))
    plan = scheduler.plan(snapshot(), NO_CACHE)
    calls = (OfflineAdded(queued(50, rid="q")),)
    assert read(path) == (SETUP, [RecordedStep(calls, Planned(snapshot(), {"q": 0}, plan))])
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_earlier_recording_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    path.write_text("an earlier recording\n")
    assert add_some(path, 1) == add_some(path, 2) - 1
    assert path.read_text() == "an earlier recording\n"
    assert len(read(tmp_path / "plans.1.jsonl")[1]) == 1
    assert len(read(tmp_path / "plans.2.jsonl")[1]) == 2


def test_a_full_recording_ends_with_a_whole_line_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "plans.jsonl"
    assert add_some(whole, 50) == 50
    lines = whole.read_bytes().splitlines(keepends=True)
    kept = b"".join(lines[:10])
    with caplog.at_level(logging.WARNING):
        assert add_some(path, 50, max_bytes=len(kept) + len(lines[10]) - 1) == 50
    assert path.read_bytes() == kept
    (warning,) = caplog.messages
    assert (
        warning == f"--record-plans {path}: it has reached its greatest length: recording ends here"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_logged_once_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert add_some(Path("/dev/full"), 50) == 50
    (warning,) = caplog.messages
    assert "No space left on device: recording ends here" in warning


def test_a_file_that_cannot_be_opened_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "plans.jsonl"
    with pytest.raises(ConfigError, match=f"--record-plans {path}: .*No such file"):
        recorded(SETUP, path)


# --- The command --------------------------------------------------------------------------


def busy_recording(path: Path) -> list[RecordedStep]:
    """Random arrivals of both classes on a small engine."""
    rng = random.Random(1)
    requests = [
        rng.choice((online, offline))(
            f"r{number}", rng.randint(1, 600), rng.randint(1, 40), number / 40
        )
        for number in range(60)
    ]
    config = ExecutorConfig(kv_capacity_tokens=2000, max_running_requests=16, max_batch_tokens=512)
    engine = SimEngine(
        recorded(SETUP, path), SimulatedExecutor(config, MODEL), TrafficSource([requests])
    )
    for _ in range(60):
        engine.step()
    return read(path)[1]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], catch_exceptions=False)


def test_the_same_policy_decides_the_same(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    num_plans = sum(step.planned is not None for step in busy_recording(path))
    result = run(path)
    first, last = result.output.splitlines()
    assert first == "recorded: coserve, ttft p99 <= 300ms, tpot p99 <= 30ms; small on cpu"
    assert last.startswith(f"{num_plans} plans, 0 differ")
    assert result.exit_code == 0
    assert len(run(path, "--plans").output.splitlines()) == num_plans + 2


def test_a_plan_that_differs_is_shown_and_exits_with_1(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    steps = busy_recording(path)
    index = max(i for i, step in enumerate(steps) if step.planned and step.planned.plan.prefills)
    step = steps[index]
    assert step.planned is not None
    plan = step.planned.plan
    (first, *others) = plan.prefills
    prefills = (first._replace(tokens=first.tokens + 1), *others)
    other = changed(step.planned, plan=replace(plan, prefills=prefills, bound_by=Bound.KV))
    steps[index] = changed(step, planned=other)
    (started, *calls) = steps[index + 1].calls
    assert isinstance(started, Started)
    steps[index + 1] = changed(steps[index + 1], calls=(Started(prefills), *calls))
    path.write_bytes(encode_setup(SETUP) + b"".join(map(encode_step, steps)))

    result = run(path)
    assert result.exit_code == 1
    place = sum(step.planned is not None for step in steps[:index])
    head, chunks, bound = result.output.splitlines()[1:4]
    assert head == f"#{place} at {step.planned.snapshot.now_s:.6f} s: prefills, bound_by differ"
    assert bound == f"  bound_by: recorded kv, replayed {plan.bound_by.value}"
    before, after = chunks.split(", replayed ")
    assert before.startswith(f"  prefills: recorded {first.rid}:{first.tokens + 1}")
    assert after.startswith(f"{first.rid}:{first.tokens}")
    assert "plans, 1 differ" in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (encode_setup(SETUP) + b"\xff\n", ":2: not valid JSON"),
        (encode_setup(SETUP) + b'{"calls":["\xff"]}\n', ":2: "),
    ],
)
def test_a_file_that_cannot_be_replayed_is_named(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "plans.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputFileError, match=message):
        run(path)
