"""The command as a user runs it, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sglang_coserve.cli.simulate import simulate
from sglang_coserve.errors import CoserveError
from sglang_coserve.simulator.compare import compare
from sglang_coserve.simulator.observer import RunControl
from sglang_coserve.simulator.options import SimulationOptions

app = typer.Typer()
app.command()(simulate)

SMALL = ["--duration", "8", "--offline", "400x40", "--max-running", "24", "--quiet"]


def run(*arguments: str, output: Path) -> str:
    words = [*SMALL, *arguments, "-o", str(output)]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_attainment_is_of_the_slos(tmp_path: Path) -> None:
    run("--policy", "coserve", "--slo", "ttft p99 <= 1us", output=tmp_path / "report")
    (result,) = json.loads((tmp_path / "report" / "report.json").read_text())["results"]
    assert result["targets"]["ttft_s"] == 1e-6
    assert result["online"]["attainment"] == 0.0


def test_a_report_of_two_policies(tmp_path: Path) -> None:
    arguments = ("--policy", "online_only, conserve", "--slo-tpot-ms", "50")
    arguments += ("--event-log",)
    output = run(*arguments, output=tmp_path / "report")
    made = files(tmp_path / "report")
    assert set(made) == {
        *("report.json", "table.txt"),
        *("events-online_only.jsonl", "events-conserve.jsonl"),
    }
    assert all(b"simulated" in content for content in made.values())
    report = json.loads(made["report.json"])
    alone, shared = report["results"]
    assert alone["offline"]["throughput"]["total_tokens_per_s"] == 0
    assert shared["offline"]["throughput"]["total_tokens_per_s"] > 1000
    assert shared["online"]["attainment"] == 1.0
    assert shared["online"]["latency"]["n"] == alone["online"]["latency"]["n"] > 0
    assert report["settings"]["hardware"] == "h100"
    assert made["table.txt"].decode() in output


def results_of(output: Path, *arguments: str) -> dict[str, Any]:
    """Results of the policy coserve; the report has nothing else and no event log."""
    run("--policy", "coserve", *arguments, output=output)
    made = files(output)
    assert set(made) == {"report.json", "table.txt"}
    report = json.loads(made["report.json"])
    assert report["settings"]["slo"] == [text for text in arguments if "<=" in text]
    (result,) = report["results"]
    assert result["offline"]["throughput"]["total_tokens_per_s"] > 0
    return dict(result)


FREE_PROMPTS, FREE_STREAMS = ("--online-slowdown", "9999%"), ("--stream-slowdown", "9999%")


@pytest.mark.parametrize(
    ("bounded", "latency"),
    [
        (("--slo", "ttft p99 <= +10%", *FREE_STREAMS), "ttft_ms"),
        (("--slo", "tbt p99 <= +10%", *FREE_PROMPTS), "itl_ms"),
        (FREE_STREAMS, "ttft_ms"),
        (FREE_PROMPTS, "itl_ms"),
    ],
    ids=["ttft", "tbt", "default of first tokens", "default of streams"],
)
def test_targets_bound_what_offline_work_adds_as_they_do_on_a_server(
    tmp_path: Path, bounded: tuple[str, ...], latency: str
) -> None:
    """The defaults of a server hold, too, where nothing else is said."""
    p99_ms = [
        results_of(tmp_path / str(len(arguments)), *arguments)["online"]["latency"][latency]["p99"]
        for arguments in (bounded, ("--seed", "0", *FREE_PROMPTS, *FREE_STREAMS))
    ]
    assert p99_ms[0] < 0.9 * p99_ms[1]


def test_without_targets_the_defaults_of_a_server_hold(tmp_path: Path) -> None:
    plain = results_of(tmp_path / "plain")
    told = results_of(tmp_path / "told", "--online-slowdown", "10%", "--stream-slowdown", "100%")
    assert plain == told
    free = results_of(tmp_path / "free", *FREE_PROMPTS, *FREE_STREAMS)
    assert plain["online"]["latency"] != free["online"]["latency"]


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    arguments = ("--policy", "conserve", "--noise", "0.1", "--event-log")
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        run(*arguments, "--seed", seed, output=tmp_path / name)
    first, second, other = (files(tmp_path / name) for name in "abc")
    assert first == second
    assert first["events-conserve.jsonl"] != other["events-conserve.jsonl"]


def test_progress_shows_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    times_s = iter([0.0] * 2 + [4.0] * 2 + [11.0] * 3 + [19.0] * 2 + [22.0] * 3)
    with RunControl(show=True, clock=lambda: next(times_s)) as control:
        control.begin("coserve", 3600.0)
        for simulated_s in (900.0, 1800.0, 2500.0, 2700.0):
            assert not control.tick(simulated_s)
    assert capfd.readouterr().err.splitlines() == [
        "simulating coserve: 1,800 of 3,600 (50%) simulated s",
        "simulating coserve: 2,700 of 3,600 (75%) simulated s",
    ]
    with RunControl(show=False, clock=iter([0.0, 0.0, 20.0, 20.0]).__next__) as control:
        control.tick(1.0)
    assert not capfd.readouterr().err


def test_without_time_nothing_is_reported(tmp_path: Path) -> None:
    assert "report" not in run("--time-limit", "0", output=tmp_path / "report")
    assert files(tmp_path / "report") == {}


def test_ctrl_c_reports_what_was_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tick = RunControl.tick

    def interrupted_tick(control: RunControl, simulated_s: float) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return tick(control, simulated_s)

    monkeypatch.setattr(RunControl, "tick", interrupted_tick)
    before = signal.getsignal(signal.SIGINT)
    arguments = [*SMALL, "--duration", "500", "--policy", "conserve,fcfs"]
    result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path)])
    assert result.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert "conserve (broken off)" in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    (only,) = report["results"]
    assert not only["is_complete"]
    assert 0 < only["interval_s"] == only["end_s"] < 500


@pytest.mark.parametrize("lengths", ["10,5", "0,0"])
def test_what_would_have_no_end_needs_a_duration(tmp_path: Path, lengths: str) -> None:
    """One request at 0 tells no interval to measure, and one that failed is left out."""
    trace = tmp_path / "trace.csv"
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,{lengths}\n")
    with pytest.raises(CoserveError, match=r"offline 40x5 never ends: .*duration"):
        SimulationOptions(trace=trace, offline="40x5").workload()
    options = SimulationOptions(trace=trace, policy="fcfs")
    (result,) = compare(options, tmp_path, RunControl(show=False))
    assert result.offline_throughput.total_tokens_per_s > 0
    assert len(result.offline) == 400  # All of the bundled sample.


def test_hygens_chunk_size_is_that_of_the_command(tmp_path: Path) -> None:
    options = SimulationOptions(
        policy="hygen", duration=4.0, step_prefill_tokens=64, offline="400x40"
    )
    compare(options, tmp_path, RunControl(show=False), event_log=True)
    lines = map(json.loads, (tmp_path / "events-hygen.jsonl").read_text().splitlines())
    chunks = [sum(n for _, n in line["prefills"]) for line in lines if line["event"] == "iteration"]
    assert max(chunks) == 64


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--slo-ttft-ms", "-5"], "slo_ttft_ms is -5"),
        (["--rate", "0"], "rate factor 0"),
        (["--offline", "missing.jsonl"], "missing.jsonl"),
        (["--model", "llama-3.1-70b"], "do not fit"),
        (["--tp-size", "5"], "tp_size=5"),
        (["--backlog", "0"], "offline 400x40 never ends"),
        (["--find-budget", "--event-log"], "--find-budget writes no event log"),
        (["--step-prefill-tokens", "64"], "step_prefill_tokens .* hygen"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, arguments: list[str], problem: str) -> None:
    with pytest.raises(CoserveError, match=problem):
        run(*arguments, output=tmp_path / "report")
