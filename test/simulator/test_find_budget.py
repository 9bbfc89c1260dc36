"""The budget search: what it finds, and what it says when there is nothing to find."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from common.arrivals import gamma_arrivals
from sglang_coserve.cli import app
from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.errors import CoserveError
from sglang_coserve.latency_profile import LatencyProfile
from sglang_coserve.profiler.fits import write_profile
from sglang_coserve.simulator.find_budget import BudgetSearch, Trial
from sglang_coserve.simulator.observer import RunControl
from sglang_coserve.simulator.options import SimulationOptions

MODEL = PolynomialModel.of(compute_token_s=1e-4, context_token_s=1e-7, iteration_s=5e-3)
"""5 ms and a tenth of one for each token."""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    write_profile(LatencyProfile(MODEL, None, "a test", "small", 1, "0.5.17"), path)
    return path


def options(profile: Path, *slos: str, prompt_tokens: int = 200) -> SimulationOptions:
    """3 online requests a second for 6 s, and offline ones without end."""
    trace = profile.with_name(f"{prompt_tokens}.csv")
    rows = [
        f"2023-11-16 18:15:{seconds:010.7f},{prompt_tokens},30"
        for seconds in takewhile(lambda at_s: at_s < 6.0, gamma_arrivals(3.0, 1.0, seed=1))
    ]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return SimulationOptions(
        trace=trace,
        offline="512x32",
        backlog=32,
        policy="hygen",
        slo=list(slos),
        duration=6.0,
        profile=profile,
        kv_capacity_tokens=30_000,
        max_running=32,
        max_batch_tokens=2048,
        max_context_tokens=4096,
        safepoint_layers=0,
        checkpoint_gb_s=0.0,
    )


def searched(asked: SimulationOptions) -> BudgetSearch:
    search = BudgetSearch(asked, RunControl(show=False))
    search.run()
    return search


def found(search: BudgetSearch) -> Trial:
    (trial,) = (each for each in search.trials if each.budget_s == search.budget_s)
    return trial


def test_the_budget_is_the_largest_that_meets_every_slo(profile: Path) -> None:
    search = searched(options(profile, "ttft p99 <= 1s", "tpot mean <= +100%"))
    assert search.budget_s is not None and search.problem is None
    assert found(search).is_met and not search.is_limit
    assert len(search.trials) <= 16
    larger = [each for each in search.trials if (each.budget_s or 0.0) > search.budget_s]
    assert larger and not any(each.is_met for each in larger)
    assert min(each.budget_s or 0.0 for each in larger) <= 1.02 * search.budget_s
    # Twice as long as online alone needs: what the tolerance says, less the reserve.
    assert search.online_only is not None and search.online_only.offline_tokens_per_s == 0
    tpot_alone_s = search.online_only.latency.tpot.mean_s
    assert tpot_alone_s is not None
    assert search.budget_s == pytest.approx(2 * tpot_alone_s, rel=0.25)


def test_a_budget_in_the_middle_of_the_range_is_found(profile: Path) -> None:
    # A small budget cuts online prompts into many chunks, so that first tokens are late; a large
    # one makes decodes late.
    slos = ("ttft p50 <= 460ms", "tpot mean <= 45ms")
    search = searched(options(profile, *slos, prompt_tokens=2000))
    assert found(search).is_met
    assert search.budget_s is not None and search.budget_s > search.least_budget_s
    late = searched(options(profile, "ttft p50 <= 200ms", prompt_tokens=2000))
    assert late.budget_s is None
    assert late.least_budget_s in [each.budget_s for each in late.trials]


def test_a_budget_between_two_that_do_not_meet_the_slos_is_found(profile: Path) -> None:
    # Of the budgets that are halved from the top one makes decodes late, and the next one prompts.
    slos = ("ttft p50 <= 390ms", "tpot mean <= 45ms")
    search = searched(options(profile, *slos, prompt_tokens=2000))
    assert search.budget_s == pytest.approx(0.045, rel=0.1)
    assert found(search).is_met and not search.is_limit


def test_slos_that_the_deadlines_alone_keep_end_the_search_at_once(profile: Path) -> None:
    search = searched(replace(options(profile, "tpot mean <= 80ms"), policy="coserve"))
    assert search.budget_s == pytest.approx(0.16)
    assert search.is_limit
    assert len(search.trials) == 1


def test_what_only_offline_work_makes_impossible(profile: Path) -> None:
    search = searched(options(profile, "ttft p99 <= +0.1%"))
    assert search.budget_s is None
    assert "online requests alone meet them: ttft p99" in (search.problem or "")
    assert search.online_only is not None and search.online_only.is_met


def test_what_is_proposed_can_be_had(profile: Path) -> None:
    search = searched(options(profile, "ttft p99 <= 10ms", "tpot mean <= 500ms"))
    assert "do not meet them either" in (search.problem or "")
    assert search.online_only is not None and not search.online_only.is_met
    (nearest,) = re.findall(r"run kept: '(ttft p99 <= [\d.]+ms)';", search.problem or "")
    assert searched(options(profile, nearest, "tpot mean <= 500ms")).budget_s


def command(asked: SimulationOptions, output: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        app,
        [
            *("simulate", "--find-budget", "--quiet", "-o", str(output)),
            *("--trace", str(asked.trace), "--profile", str(asked.profile)),
            *("--offline", "128x16", "--duration", "6", "--max-running", "8"),
            *("--policy", "hygen", *arguments),
        ],
        env={"COLUMNS": "200"},
        catch_exceptions=False,
    )


def written(output: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((output / "budget.json").read_text())
    return document


def test_the_command_prints_how_to_serve_with_the_budget(tmp_path: Path, profile: Path) -> None:
    result = command(
        options(profile), tmp_path / "out", "--slo", "ttft p99 <= 1000ms", "tpot mean <= +50%"
    )
    assert result.exit_code == 0, result.output
    budget = written(tmp_path / "out")
    assert budget["label"] == "simulated" and "(simulated)" in result.output
    assert f"budget: {budget['budget_ms']:.4g} ms simulated" in result.output
    assert budget["serve"] in result.output
    runs = budget["runs"]
    assert [slo["slo"] for slo in runs[0]["slos"]] == ["ttft p99 <= 1000ms", "tpot mean <= +50%"]
    (chosen,) = (run for run in runs if run["budget_ms"] == budget["budget_ms"])
    assert chosen["is_met"] and chosen["offline_tokens_per_s"] > 0
    # The server takes the flags and means the same.
    parser = argparse.ArgumentParser()
    CoserveConfig.add_cli_args(parser)
    flags = shlex.split(budget["serve"])[2:]
    config = CoserveConfig.from_mapping(vars(parser.parse_args(flags)))
    assert config.offline_policy == "hygen" and config.latency_profile == str(profile)
    assert config.iteration_budget_ms == pytest.approx(budget["budget_ms"], rel=1e-3)
    limits_ms = [slo["limit_ms"] for slo in chosen["slos"]]
    assert [(slo.limit_s or 0.0) * 1e3 for slo in config.slos()] == pytest.approx(limits_ms, 1e-3)


def test_slos_that_nothing_meets_exit_with_1(tmp_path: Path, profile: Path) -> None:
    result = command(options(profile), tmp_path / "out", "--slo", "ttft p99 <= 1ms")
    assert result.exit_code == 1
    assert "no budget: the best was" in result.output
    budget = written(tmp_path / "out")
    assert budget["budget_ms"] is None and budget["serve"] is None
    assert "do not meet them either" in budget["problem"]


def test_ctrl_c_reports_what_was_simulated(
    tmp_path: Path, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, names = RunControl.begin, []

    def interrupted(control: RunControl, name: str, interval_s: float) -> None:
        names.append(name)
        if len(names) == 4:  # Online requests alone, two budgets, and this one.
            os.kill(os.getpid(), signal.SIGINT)
        begin(control, name, interval_s)

    monkeypatch.setattr(RunControl, "begin", interrupted)
    result = command(options(profile), tmp_path / "out", "--slo", "tpot mean <= +50%")
    assert result.exit_code == 130
    assert "no budget: the search ended early" in result.output
    budget = written(tmp_path / "out")
    assert len(budget["runs"]) == 2
    assert budget["budget_ms"] is None and budget["serve"] is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"policy": "conserve"}, "coserve or hygen"),
        ({"policy": "coserve,hygen"}, "coserve or hygen"),
        ({"offline": "none"}, "no budget is needed"),
        ({"slo": ()}, "any budget would do"),
        ({"slo": ("ttft p98 <= 3s",)}, "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_named(profile: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CoserveError, match=problem):
        searched(replace(options(profile, "ttft p99 <= 1s"), **changes))
