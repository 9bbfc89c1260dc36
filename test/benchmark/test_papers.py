"""The papers' experiments: they run, and say what they depend on."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from bench_papers import EXPERIMENTS, run
from paper.experiment import what_runs


@pytest.mark.parametrize(("name", "seconds"), [("conserve_fig6", 10.0), ("ooco_fig6", 0.5)])
def test_an_experiment_gives_its_tables_and_the_papers_claims(name: str, seconds: float) -> None:
    table = run(name, replace(EXPERIMENTS[name], seconds=seconds), "0123456789ab")
    assert "Simulated, not measured" in table
    assert "commit 0123456789ab, inputs " in table
    assert f"{seconds:g} simulated seconds" in table
    assert "| the paper's text | paper | ours |" in table


def test_a_table_depends_on_its_own_policies() -> None:
    modules = {name: EXPERIMENTS[name].modules() for name in EXPERIMENTS}
    core = "sglang_coserve.core"
    assert {"paper.hygen", f"{core}.policies.hygen", f"{core}.scheduler"} <= {
        *modules["hygen_fig6"]
    }
    assert f"{core}.policies.bros" in modules["bros_fig9_10"]
    assert f"{core}.policies.bros" not in modules["hygen_fig6"]


def test_comments_and_docstrings_change_nothing_and_code_does() -> None:
    def runs(source: str) -> object:
        return what_runs(ast.parse(source))

    code = runs("X = 1\n\ndef f(a):\n    return None if a else X\n")
    assert runs('"""Doc."""\nX = 1  # One.\n"""More."""\ndef f(a): return None if a else X') == code
    assert runs("X = 2\n\ndef f(a):\n    return None if a else X\n") != code
    assert runs("X = 1\n\ndef f(a):\n    return X if a else None\n") != code
