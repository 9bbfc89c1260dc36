"""``coserve simulate --sweep``: the frontier of a trace."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sglang_coserve.cli.simulate import simulate
from sglang_coserve.errors import ConfigError
from sglang_coserve.simulator.observer import RunControl
from sglang_coserve.simulator.options import SimulationOptions
from sglang_coserve.simulator.sweep import CHUNK_TOKENS, GAPS_MS, STREAM_SLOWDOWNS, Sweep
from sglang_coserve.terminal import INTERRUPTED

app = typer.Typer()
app.command()(simulate)

SMALL = {"duration": 6.0, "offline": "400x40", "max_running": 24, "backlog": 32}
NUM_RUNS = 1 + len(STREAM_SLOWDOWNS) + len(GAPS_MS) + len(CHUNK_TOKENS)


class StopsAfter(RunControl):
    """Ends the first run after ``num_runs`` others, as Ctrl-C does."""

    def __init__(self, num_runs: int) -> None:
        super().__init__(show=False)
        self._num_runs = num_runs

    def begin(self, name: str, interval_s: float) -> None:
        self.is_interrupted = self._num_runs == 0
        self._num_runs -= 1
        super().begin(name, interval_s)


def test_the_command_prints_a_row_for_each_setting_and_writes_all_figures(tmp_path: Path) -> None:
    words = ["--sweep", "--duration", "6", "--offline", "400x40", "--max-running", "24"]
    result = CliRunner().invoke(app, [*words, "--quiet", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "sweep.json").read_text())
    assert report["label"] == "simulated"
    runs = report["runs"]
    assert len(runs) == NUM_RUNS
    for run in runs:
        assert run["name"] in result.output
        assert run["online"]["latency"]["n"] == runs[0]["online"]["latency"]["n"] > 0
    tokens = [run["offline"]["throughput"]["total_tokens_per_s"] for run in runs]
    assert tokens[0] == 0 < min(tokens[1:])
    assert runs[1]["flags"] == ["--stream-slowdown", "25%"]
    assert "ours, streams +100%, the default" in result.output
    assert "first tokens within 10% of alone" in result.output


def test_settings_differ_as_their_names_say() -> None:
    sweep = Sweep(SimulationOptions(**SMALL), RunControl(show=False))
    sweep.run()
    gaps_ms = {run["name"]: run["online"]["latency"]["itl_ms"] for run in sweep.to_dict()["runs"]}
    for narrow, wide in (
        ("ours, streams +25%", "ours, streams +200%"),
        ("ours, P99 gap 15 ms", "ours, P99 gap 40 ms"),
        ("stock-like, mixed chunks of 256", "stock-like, mixed chunks of 2,048"),
    ):
        assert gaps_ms[narrow]["p99"] < gaps_ms[wide]["p99"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"slo": ["ttft p99 <= 300ms"]}, "--slo sets"),
        ({"policy": "conserve"}, "--policy"),
        ({"stream_slowdown": "50%"}, "--stream-slowdown"),
        ({"slo_ttft_ms": 300.0}, "--slo-ttft-ms"),
    ],
)
def test_flags_that_the_sweep_sets_are_refused(options: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match="leave them out") as error:
        Sweep(SimulationOptions(**{**SMALL, **options}), RunControl(show=False))
    assert name.split()[0] in str(error.value)


def test_a_sweep_needs_offline_requests_and_no_other_search(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without offline requests"):
        Sweep(SimulationOptions(offline="none"), RunControl(show=False))
    words = ["--sweep", "--find-budget", "-o", str(tmp_path)]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, ConfigError)
    assert "use one of them" in str(error)


def test_an_interrupted_sweep_has_the_runs_so_far() -> None:
    control = StopsAfter(2)
    sweep = Sweep(SimulationOptions(**{**SMALL, "duration": 60.0}), control)
    sweep.run()
    first, second, third = sweep.to_dict()["runs"]
    assert first["is_complete"] and second["is_complete"] and not third["is_complete"]
    assert math.isfinite(third["interval_s"])
    assert "ours, streams +50% (broken off)" in sweep.to_text()


def test_the_command_ends_cleanly_when_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunControl, "should_stop", property(lambda _: True))
    monkeypatch.setattr(RunControl, "is_interrupted", True)
    words = ["--sweep", "--duration", "6", "--offline", "400x40", "--quiet", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == INTERRUPTED
    assert json.loads((tmp_path / "sweep.json").read_text())["runs"] == []
