"""The papers' experiments: they run, and what they write says that it is simulated."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench_papers import EXPERIMENTS, run

STORED = Path(__file__).parents[2] / "benchmark" / "results" / "paper"


@pytest.mark.parametrize(("name", "seconds"), [("conserve_fig6", 10.0), ("ooco_fig6", 0.5)])
def test_an_experiment_writes_its_tables_and_the_papers_claims(
    name: str, seconds: float, tmp_path: Path
) -> None:
    run(name, argparse.Namespace(seconds=seconds, trace=None, out=tmp_path))
    written = (tmp_path / f"{name}.md").read_text()
    assert "Simulated, not measured" in written
    assert f"{seconds:g} simulated seconds" in written
    assert "| the paper's text | paper | ours |" in written


def test_every_experiment_has_stored_results() -> None:
    assert {path.stem for path in STORED.glob("*.md")} == set(EXPERIMENTS)
