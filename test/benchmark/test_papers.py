"""The papers' experiments: they run, and what they write says that it is simulated."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench_papers import EXPERIMENTS, run
from paper.experiment import Findings, to_json, to_markdown

STORED = Path(__file__).parents[2] / "benchmark" / "results" / "paper"


@pytest.mark.parametrize(("name", "seconds"), [("conserve_fig6", 3.0), ("ooco_fig6", 0.5)])
def test_an_experiment_writes_its_tables_and_the_papers_claims(
    name: str, seconds: float, tmp_path: Path
) -> None:
    run(name, argparse.Namespace(seconds=seconds, trace=None, out=tmp_path))
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert (record["label"], record["simulated_seconds"]) == ("simulated", seconds)
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
