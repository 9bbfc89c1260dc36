"""The papers' experiments: they run, and the stored tables are what the code gives."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench_papers import EXPERIMENTS, run
from paper.experiment import what_runs
from paper.hygen_settings import SETTINGS, serve
from paper.testbed import Testbed as Machine
from paper.testbed import azure_online
from sglang_coserve.core.control.allowance import Targets
from sglang_coserve.core.policies.hygen import HygenPolicy
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets

STORED = Path(__file__).parents[2] / "benchmark" / "results" / "paper"


@pytest.mark.parametrize(("name", "seconds"), [("conserve_fig6", 10.0), ("ooco_fig6", 0.5)])
def test_an_experiment_gives_its_tables_and_the_papers_claims(name: str, seconds: float) -> None:
    table = run(name, replace(EXPERIMENTS[name], seconds=seconds), "0123456789ab")
    assert "Simulated, not measured" in table
    assert "commit 0123456789ab, inputs " in table
    assert f"{seconds:g} simulated seconds" in table
    assert "| the paper's text | paper | ours |" in table


def test_every_experiment_has_stored_results() -> None:
    assert {path.stem for path in STORED.glob("*.md")} == set(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_stored_table_is_what_the_code_gives(name: str) -> None:
    told = re.search(r", commit [0-9a-f]{12}, inputs (\w+), ", (STORED / f"{name}.md").read_text())
    assert told[1] == EXPERIMENTS[name].inputs_hash(), (
        f"what {name}.md depends on has changed: commit it, run `python benchmark/bench_papers.py "
        f"{name} --out benchmark/results/paper`, and see whether docs still quote it right"
    )


def test_a_table_depends_on_its_own_policies() -> None:
    modules = {name: EXPERIMENTS[name].modules() for name in EXPERIMENTS}
    core = "sglang_coserve.core"
    assert {"paper.hygen", f"{core}.policies.hygen", f"{core}.scheduler"} <= {
        *modules["hygen_fig6"]
    }
    assert f"{core}.policies.bros" in modules["bros_fig9_10"]
    assert f"{core}.policies.bros" not in modules["hygen_fig6"]
    registry = f"{core}.policies"
    assert [name for name in modules if registry in modules[name]] == []


def test_comments_and_docstrings_change_nothing_and_code_does() -> None:
    def runs(source: str) -> object:
        return what_runs(ast.parse(source))

    code = runs("X = 1\n\ndef f(a):\n    return None if a else X\n")
    assert runs('"""Doc."""\nX = 1  # One.\n"""More."""\ndef f(a): return None if a else X') == code
    assert runs("X = 2\n\ndef f(a):\n    return None if a else X\n") != code
    assert runs("X = 1\n\ndef f(a):\n    return X if a else None\n") != code


def test_the_targets_of_a_testbed_hold_alone() -> None:
    """The defaults of the policy coserve would bind the policies of papers, too."""
    targets = SloTargets(ttft_s=1.0, tpot_s=0.1)
    setup = Machine().with_targets(targets)
    assert (setup.targets, setup.scheduler.stream_slowdown) == (targets, None)
    scheduler = setup.make_scheduler(HygenPolicy())
    assert scheduler.interference.allowance.targets == Targets(ttft_s=1.0, gap_s=0.1)


def test_the_bundled_trace_is_sampled_to_the_rate_and_no_further() -> None:
    online = list(azure_online(58.0, 10.0)())
    assert len(online) == pytest.approx(580, abs=20)
    assert online[-1].info.arrival_s < 10
    with pytest.raises(ConfigError, match="600 requests: the bundled trace has 587"):
        azure_online(60.0, 10.0)


def test_two_batches_in_flight_advance_at_the_pace_of_the_slower() -> None:
    figure = next(name for name in SETTINGS if "PP=2" in name)
    setting = SETTINGS[figure][1]
    model = setting.testbed.machine.roofline()

    def paces(stages: int) -> list[float]:
        steps = serve(replace(setting, stages=stages), (0.0, 20.0), HygenPolicy, 0.2).steps
        return [step.seconds / model.predict(step.batch) for step in steps]

    assert max(paces(1)) < 1.1  # Noise.
    assert max(paces(2)) > 1.2
    assert min(paces(2)) > 0.9
