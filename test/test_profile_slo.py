"""``coserve profile slo`` as a user runs it: its results, its refusals, and the real engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from sglang_coserve.cli import app
from sglang_coserve.core.latency_model import CONSERVE, LatencyProfile, LinearModel
from sglang_coserve.errors import ConfigError, CoserveError, InputFileError
from sglang_coserve.profiler import write_profile
from sglang_coserve.slo_search.progress import SearchProgress

TIMEOUT_S = 300

SHORT = ("--duration", "20", "--offline", "128x16", "--policy", "hygen", "--quiet")
SLOS = ("--slo", "ttft p99 <= 400ms", "tpot mean <= +50%")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Iterations of 4 ms and a tenth of one for each token."""
    model = LinearModel.of(CONSERVE, compute_token_s=1e-4, iteration_s=4e-3)
    path = tmp_path / "profile.json"
    write_profile(LatencyProfile(model, None, "a test", "small", 1, "0.5.17"), path)
    return path


def run(*arguments: str, command: tuple[str, ...] = ("profile", "slo")) -> Result:
    result = CliRunner().invoke(app, [*command, *arguments], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_a_budget_and_all_that_led_to_it(tmp_path: Path, profile: Path) -> None:
    output = tmp_path / "budget.json"
    result = run("--profile", str(profile), *SLOS, *SHORT, "-o", str(output))
    assert result.exit_code == 0, result.output
    budget = read(output)
    assert "(simulated)" in result.output
    assert f"budget: {budget['budget_ms']:.4g} ms simulated" in result.output
    assert budget["serve"] in result.output
    assert f"--latency-profile {profile}" in budget["serve"]
    assert budget["simulated"]["online_only"]["is_met"]
    runs = budget["simulated"]["runs"]
    assert [slo["slo"] for slo in runs[0]["slos"]] == ["ttft p99 <= 400ms", "tpot mean <= +50%"]
    (chosen,) = (run for run in runs if run["budget_ms"] == budget["budget_ms"])
    assert chosen["is_met"]
    assert chosen["offline_tokens_per_s"] > 0
    assert not any(run["is_met"] for run in runs if run["budget_ms"] > budget["budget_ms"])
    assert not budget["is_validated"]
    assert budget["measured"] == {"online_only": None, "runs": []}
    assert budget["settings"]["slo"] == ["ttft p99 <= 400ms", "tpot mean <= +50%"]
    assert budget["profile"]["model"] == "small"
    # One flag with two values is two flags with one.
    again = run("--profile", str(profile), "--slo", SLOS[1], *SHORT, "--slo", SLOS[2])
    assert again.output == result.output.replace(f"written: {output}\n", "")


def test_slos_that_nothing_meets_exit_with_1(tmp_path: Path, profile: Path) -> None:
    output = tmp_path / "budget.json"
    slo = ("--slo", "ttft p99 <= 1ms")
    result = run("--profile", str(profile), *slo, *SHORT, "-o", str(output))
    assert result.exit_code == 1
    assert "not even online requests alone" in result.output
    assert re.search(r"kept: 'ttft p99 <= [\d.]+ms'", result.output)
    budget = read(output)
    assert budget["budget_ms"] is None and budget["serve"] is None
    assert "not even online" in budget["problem"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--slo", "ttft p98 <= 1s"], "ttft p98"),
        (["--slo", "ttft p99 <= 1s", "tpot"], "'tpot' cannot be read"),
        ([*SLOS, "--policy", "bros"], "--policy bros"),
        ([*SLOS, "--offline", "none"], "no budget is needed"),
        ([*SLOS, "--offline", "4000x400"], "beyond the context"),
        ([*SLOS, "--trace", "missing.csv"], "missing.csv"),
        ([*SLOS, "--validate"], "--model-path"),
        ([*SLOS, "--model-path", "model"], "--model-path: .* only --validate"),
        ([*SLOS, "--dtype", "float32"], "--dtype: .* only --validate"),
    ],
)
def test_what_cannot_be_used_is_named(profile: Path, arguments: list[str], problem: str) -> None:
    with pytest.raises(CoserveError, match=problem):
        run("--profile", str(profile), "--quiet", *arguments)


def test_a_file_that_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="coserve profile --model-path"):
        run("--profile", str(tmp_path / "none.json"), *SLOS)


def test_profile_itself_stays_as_it_was(tmp_path: Path) -> None:
    assert " profile slo [OPTIONS]" in run("--help").output
    own = run("--help", command=("profile",)).output
    assert " profile [OPTIONS]" in own and "--max-shapes" in own
    assert "--validate" not in own
    overview = run("--help", command=()).output
    assert re.search(r"│ profile +Measure", overview)
    assert re.search(r"│ profile slo +Find", overview)
    # Flags of SGLang and their values still pass, even one called slo.
    flags = ("--model-path", "m", "--served-model-name", "slo", "-o", str(tmp_path / "p.json"))
    with pytest.raises(ConfigError, match="--kind best!"):
        run(*flags, "--kind", "best!", command=("profile",))


def test_ctrl_c_reports_what_was_simulated(
    tmp_path: Path, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = SearchProgress.begin

    def interrupted_begin(progress: SearchProgress, what: str, seconds: float) -> None:
        if what.startswith("run 3"):
            os.kill(os.getpid(), signal.SIGINT)
        begin(progress, what, seconds)

    monkeypatch.setattr(SearchProgress, "begin", interrupted_begin)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    output = tmp_path / "budget.json"
    result = run("--profile", str(profile), *SLOS, *SHORT, "-o", str(output))
    assert result.exit_code == 130
    assert "no budget: the search ended early" in result.output
    budget = read(output)
    assert len(budget["simulated"]["runs"]) == 2
    assert budget["budget_ms"] is None
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def command(*arguments: str) -> subprocess.Popen[str]:
    main = "import sys; from sglang_coserve.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", main, "profile", "slo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def servers_of(model: Path) -> list[psutil.Process]:
    """Living processes of servers of this model."""
    found = []
    for process in psutil.process_iter():
        try:
            if "sglang_coserve.launch_server" in process.cmdline() and str(model) in (
                process.cmdline()
            ):
                found += [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
    return [process for process in found if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_budget_is_validated_on_the_engine(
    tmp_path: Path, profile: Path, small_model: Path
) -> None:
    output = tmp_path / "budget.json"
    process = command(
        *("--profile", str(profile), "--slo", "ttft p99 <= 30s", "tpot mean <= 5s"),
        *("--duration", "20", "--rate", "0.5", "--offline", "64x8", "--offline-concurrency", "4"),
        *("--validate", "--model-path", str(small_model), "--validate-seconds", "6"),
        # SGLang's own: the engine that is modelled has them too.
        *("--max-running-requests", "12", "--max-total-tokens", "9000"),
        *("-o", str(output)),
    )
    text, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, text
    budget = read(output)
    assert budget["is_validated"]
    assert "validated in 6 s on this machine" in text
    assert budget["engine"]["kv_capacity_tokens"] == 9000
    assert budget["engine"]["max_running"] == 12
    assert budget["engine"]["max_context_tokens"] < 1024
    measured = budget["measured"]
    assert measured["online_only"]["online"]["finished"] > 0
    assert measured["online_only"]["offline_tokens_per_s"] == 0
    (run,) = measured["runs"]
    assert run["measured"]["online"]["finished"] == measured["online_only"]["online"]["finished"]
    assert run["simulated_same_load"]["online"]["n"] == run["measured"]["online"]["n"]
    assert run["measured"]["offline_tokens_per_s"] > 0
    assert re.search(r"run 1, measured / simulated: ttft p99 [\d.]+, tpot mean [\d.]+", text)
    assert f"--model-path {small_model} --max-running-requests 12" in budget["serve"]
    assert not servers_of(small_model)


@pytest.mark.parametrize(
    # The other one is tested at the demo, and both do the same.
    "signum",
    [pytest.param(signal.SIGINT, marks=pytest.mark.heavy), signal.SIGTERM],
)
def test_an_interrupted_validation_leaves_no_server_behind(
    profile: Path, small_model: Path, signum: signal.Signals
) -> None:
    flags = ("--validate", "--model-path", str(small_model))
    process = command("--profile", str(profile), *SLOS, *SHORT, *flags)
    deadline = time.monotonic() + TIMEOUT_S
    # The HTTP server and its first child.
    while len(started := servers_of(small_model)) < 2:
        assert time.monotonic() < deadline, "the server did not start"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.2)
    os.kill(process.pid, signum)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert "Traceback" not in text
    assert not [p for p in started if is_alive(p)]
