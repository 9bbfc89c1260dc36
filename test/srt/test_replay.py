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

from core.scheduler.scenarios import MODEL, queued
from sglang_coserve.cli import app
from sglang_coserve.config import OFFLINE_POLICIES
from sglang_coserve.core.control.slo import deadlines
from sglang_coserve.core.latency_model.profile import LatencyProfile
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.errors import ConfigError, InputFileError
from sglang_coserve.metrics import SloTargets
from sglang_coserve.recording.calls import (
    Arrived,
    Event,
    Finished,
    OfflineAdded,
    Planned,
    SchedulerSetup,
    Started,
    Updated,
    replay,
)
from sglang_coserve.recording.file import EventEncoder, encode_setup, read_recording
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


def read(path: Path) -> tuple[SchedulerSetup, list[Event]]:
    with path.open(encoding="ascii") as lines:
        setup, events = read_recording(lines, str(path))
        return setup, list(events)


# --- On the engine ------------------------------------------------------------------------


PLANNED = {"startup_profile_seconds": 0.0, "slo_ttft_ms": 300.0, "slo_tpot_ms": 30.0}


def mixed_load() -> list[Spec]:
    return scenarios.mixed_specs(seed=13, num_online=15, num_offline=25)


def assert_replays(path: Path, policy: str) -> None:
    setup, events = read(path)
    assert setup.policy == policy
    assert setup.slos == SETUP.slos
    kinds = {type(event) for event in events}
    assert kinds >= {Arrived, OfflineAdded, Planned, Started, Updated, Finished}
    assert_each_step_has_a_result(events)
    replays = list(replay(events, setup.make()))
    assert len(replays) > 200
    assert [plan.index for plan in replays if plan.differences] == []


def assert_each_step_has_a_result(events: list[Event]) -> None:
    """One each, in order, that tells of no more than was admitted."""
    admitted: dict[int, Started] = {}
    step, done = -1, []
    for event in events:
        if isinstance(event, Planned):
            step = event.plan.step
        elif isinstance(event, Started):
            admitted[step] = event
        elif isinstance(event, Updated):
            result = event.result
            if result.step is None:
                continue
            done.append(result.step)
            assert set(result.chunks) <= set(admitted[result.step].chunks)
            assert result.dropped or result.batch.prefill_requests == len(result.chunks)
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


@pytest.mark.parametrize("policy", [name for name in OFFLINE_POLICIES if name != "fifo"])
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
    _, events = read(path)
    started = {chunk for event in events if isinstance(event, Started) for chunk in event.chunks}
    planned = {c for event in events if isinstance(event, Planned) for c in event.plan.prefills}
    assert started - planned


# --- The file -----------------------------------------------------------------------------


def add_some(path: Path, count: int, **settings: Any) -> int:
    """Record ``count`` arrivals; return how many the scheduler has afterwards."""
    scheduler = recorded(SETUP, path, **settings)
    for number in range(count):
        scheduler.add_offline(queued(50, rid=f"q{number}"))
    return len(scheduler.queue)


def test_what_was_recorded_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    scheduler = recorded(SETUP, path)
    scheduler.add_offline(queued(50, rid="q"))
    assert read(path) == (SETUP, [OfflineAdded(queued(50, rid="q"))])


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
    path = tmp_path / "plans.jsonl"
    with caplog.at_level(logging.WARNING):
        assert add_some(path, 50, max_bytes=4000) == 50
    assert 3500 < path.stat().st_size <= 4000
    _, events = read(path)
    assert [event.request.rid for event in events] == [f"q{i}" for i in range(len(events))]
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


def busy_recording(path: Path) -> list[Event]:
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
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_same_policy_decides_the_same(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    num_plans = sum(isinstance(event, Planned) for event in busy_recording(path))
    result = run(path)
    first, last = result.output.splitlines()
    assert first == "recorded: coserve, ttft p99 <= 300ms, tpot p99 <= 30ms; small on cpu"
    assert last.startswith(f"{num_plans} plans, 0 differ")
    assert result.exit_code == 0
    assert len(run(path, "--plans").output.splitlines()) == num_plans + 2


def test_a_plan_that_differs_is_shown_and_exits_with_1(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    events = busy_recording(path)
    index = max(i for i, e in enumerate(events) if isinstance(e, Planned) and e.plan.prefills)
    event = events[index]
    (first, *others) = event.plan.prefills
    prefills = (first._replace(tokens=first.tokens + 1), *others)
    events[index] = changed(event, plan=replace(event.plan, prefills=prefills))
    started = next(i for i, e in enumerate(events) if isinstance(e, Started) and i > index)
    events[started] = Started(prefills)
    encoder = EventEncoder()
    path.write_text(encode_setup(SETUP) + "".join(map(encoder.encode, events)))

    result = run(path)
    assert result.exit_code == 1
    place = sum(isinstance(event, Planned) for event in events[:index])
    head, was, now = result.output.splitlines()[1:4]
    assert head == f"#{place} at {event.snapshot.now_s:.6f} s: prefills differ"
    assert f"prefill {first.rid}:{first.tokens + 1}" in was
    assert f"prefill {first.rid}:{first.tokens}" in now
    assert "plans, 1 differ" in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        (encode_setup(SETUP) + "\xff\n", ":2: not valid JSON"),
    ],
)
def test_what_cannot_be_replayed_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "plans.jsonl"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(InputFileError, match=message):
        run(path)
