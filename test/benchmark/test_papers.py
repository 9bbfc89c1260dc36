"""The papers' experiments: every one runs, and what it writes says that it is simulated."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench_papers import EXPERIMENTS, run
from paper.experiment import Findings, to_json, to_markdown

STORED = Path(__file__).parents[2] / "benchmark" / "results" / "paper"


@pytest.mark.parametrize("name", ["conserve_ablation", "bros_fig12", "hygen_fig7"])
def test_an_experiment_writes_its_tables_and_the_papers_claims(name: str, tmp_path: Path) -> None:
    run(name, argparse.Namespace(seconds=5.0, trace=None, out=tmp_path))
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert (record["label"], record["simulated_seconds"]) == ("simulated", 5.0)
    for findings in record["findings"]:
        assert {len(row) for row in findings["rows"]} == {len(findings["columns"])}
    assert "Simulated, not measured" in (tmp_path / f"{name}.md").read_text()


def test_what_is_no_number_is_null() -> None:
    findings = [Findings("Fig. 1", ("a", "b"), [("x", float("nan"))])]
    assert to_json(findings)[0]["rows"] == [["x", None]]
    assert "| x | nan |" in to_markdown("Title", "command", findings)


def test_every_experiment_has_stored_results() -> None:
    assert {path.stem for path in STORED.glob("*.json")} == set(EXPERIMENTS)
    assert {path.stem for path in STORED.glob("*.md")} == set(EXPERIMENTS)
