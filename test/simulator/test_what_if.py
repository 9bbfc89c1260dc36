"""Recorded traffic simulated again: as it was, and with something changed.

The recording is of a simulated engine here, so what simulating it again should give is known.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from core.scheduler.scenarios import MODEL
from sglang_coserve.cli.groups import SeveralSlosCommand
from sglang_coserve.cli.what_if import what_if
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.slo import deadlines, parse_slo
from sglang_coserve.core.latency_model import LatencyProfile
from sglang_coserve.core.recording import (
    EventEncoder,
    RecordingScheduler,
    SchedulerSetup,
    encode_setup,
)
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.errors import ConfigError, CoserveError, InputFileError
from sglang_coserve.metrics import RequestTimeline, SloTargets, latency_report
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.recorded_traffic import RecordedTraffic, read_traffic
from sglang_coserve.simulator.source import TrafficSource
from sglang_coserve.simulator.what_if import Change, compare_change, parse_share
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


@pytest.fixture(scope="module")
def recording() -> tuple[list[str], list[RequestTimeline], int]:
    return recorded()


@pytest.fixture(scope="module")
def traffic(recording: tuple[list[str], list[RequestTimeline], int]) -> RecordedTraffic:
    return read_traffic(recording[0], "plans.jsonl")


def test_what_was_measured_is_read(
    recording: tuple[list[str], list[RequestTimeline], int], traffic: RecordedTraffic
) -> None:
    _, timelines, tokens = recording
    found, expected = latency_report(traffic.timelines), latency_report(timelines)
    assert found.finished == expected.finished == 60
    assert found.ttft.p99_s == pytest.approx(expected.ttft.p99_s)
    assert found.itl.p99_s == pytest.approx(expected.itl.p99_s)
    assert traffic.offline_tokens == pytest.approx(tokens, rel=0.01)


def test_simulated_as_recorded_it_is_what_was_measured(traffic: RecordedTraffic) -> None:
    found = compare_change(traffic, Change(), runs=1)
    assert found is not None
    assert found.changed is None
    assert found.simulated.ttft_s == pytest.approx(found.recorded.ttft_s, rel=0.1)
    assert found.simulated.itl_s == pytest.approx(found.recorded.itl_s, rel=0.1)
    assert found.simulated.offline_tokens == pytest.approx(found.recorded.offline_tokens, rel=0.02)
    assert "is off by" in found.sentence()


def test_more_offline_requests_are_more_tokens(traffic: RecordedTraffic) -> None:
    more = compare_change(traffic, Change(more_offline=0.2), runs=1)
    fewer = compare_change(traffic, Change(more_offline=-0.5), runs=1)
    assert more is not None and more.changed is not None
    assert fewer is not None and fewer.changed is not None
    ratio = more.changed.offline_tokens / more.simulated.offline_tokens
    assert ratio == pytest.approx(1.2, rel=0.05)
    ratio = fewer.changed.offline_tokens / fewer.simulated.offline_tokens
    assert ratio == pytest.approx(0.5, rel=0.1)
    assert "more offline tokens" in more.sentence()
    assert "fewer offline tokens" in fewer.sentence()


def test_copies_are_spread_and_share_nothing(traffic: RecordedTraffic) -> None:
    requests = traffic.offline_requests(1.0)
    assert len(requests) == 300
    assert len({request.info.rid for request in requests}) == 300
    times = [request.info.arrival_s for request in requests]
    assert times == sorted(times)
    assert times[0] == times[1] < times[2]
    assert traffic.offline_requests(-1.0) == []


def test_another_policy_and_other_slos_are_simulated(traffic: RecordedTraffic) -> None:
    change = Change(policy="online_only", slos=(parse_slo("ttft p99 <= 200ms"),))
    found = compare_change(traffic, change, runs=1)
    assert found is not None and found.changed is not None
    assert found.changed.offline_tokens == 0
    assert "policy online_only, ttft p99 <= 200ms" in found.table()


def test_the_same_twice_is_the_same(traffic: RecordedTraffic) -> None:
    change = Change(more_offline=0.3)
    assert compare_change(traffic, change, runs=1) == compare_change(traffic, change, runs=1)


def test_steps_of_other_runs_take_other_times(traffic: RecordedTraffic) -> None:
    noisy = replace(traffic, noise_cv=0.3)
    once, thrice = (compare_change(noisy, Change(), runs=runs) for runs in (1, 3))
    assert once is not None and thrice is not None
    singles = thrice.simulated.single
    assert (len(once.simulated.single), len(singles)) == (0, 3)
    assert singles[0] == once.simulated.online
    assert len({report.itl.p99_s for report in singles}) == 3
    assert thrice.simulated.online.n == 3 * once.simulated.online.n
    p99s_s = [report.itl.p99_s or 0.0 for report in singles]
    assert min(p99s_s) <= (thrice.simulated.itl_s or 0.0) <= max(p99s_s)
    assert thrice.simulated.offline_tokens == pytest.approx(once.simulated.offline_tokens, rel=0.02)
    assert "Single runs, as recorded: P99 TTFT" in thrice.sentence()
    assert "Single runs" not in once.sentence()


def test_no_run_is_refused(traffic: RecordedTraffic) -> None:
    with pytest.raises(ConfigError, match="--runs 0"):
        compare_change(traffic, Change(), runs=0)


@pytest.mark.parametrize(("text", "share"), [("+20%", 0.2), ("-100%", -1.0), (" +2.5 % ", 0.025)])
def test_shares_are_read(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["20%", "+20", "-101%", "many", "+nan%"])
def test_other_shares_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write \+20%"):
        parse_share(text)


def test_a_recording_without_plans_is_refused() -> None:
    with pytest.raises(InputFileError, match="nothing was planned"):
        read_traffic([encode_setup(SETUP)], "plans.jsonl")


app = typer.Typer()
app.command(cls=SeveralSlosCommand)(what_if)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--quiet"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_says_what_would_be_and_how_far_it_is_off(
    tmp_path: Path, recording: tuple[list[str], list[RequestTimeline], int]
) -> None:
    plans = tmp_path / "plans.jsonl"
    plans.write_text("".join(recording[0]))
    output = run(
        str(plans),
        "--offline",
        "+20%",
        "--slo",
        "ttft p99 <= 1s",
        "tpot p99 <= 90ms",
        "--runs",
        "2",
    )
    assert "recorded (measured)" in output
    assert "(simulated)" in output
    assert "is off by" in output
    assert output.count("Single runs, ") == 2
    with pytest.raises(CoserveError, match="cannot be read"):
        run(str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="time-limit"):
        run(str(plans), "--time-limit", "0")
