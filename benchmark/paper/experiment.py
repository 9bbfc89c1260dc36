"""One experiment of a paper: what runs, what came of it, and what the paper states."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import grimp

from sglang_coserve.terminal import markdown_table
from sglang_coserve.workload.trace import sample_path

Cell = str | float | int


@dataclass(frozen=True, slots=True)
class Findings:
    """One figure or table of a paper."""

    figure: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    claims: Sequence[tuple[str, str, str]] = ()
    """What the paper's text states, its figure and ours. docs/papers.md says why they differ."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """What ``bench_papers.py`` runs under a name."""

    title: str
    measure: Callable[[float], Iterator[Findings]]
    """Gets the simulated seconds of a run."""

    seconds: float = 120.0

    def modules(self) -> list[str]:
        """Return its own module and all that it imports, directly or not."""
        graph = grimp.build_graph("sglang_coserve", "paper", "common", cache_dir=None)
        own = self.measure.__module__
        return sorted({own, *graph.find_upstream_modules(own)})

    def inputs_hash(self) -> str:
        """Return a hash of what its tables depend on: these modules, the trace, the seconds."""
        found = hashlib.sha256(sample_path("online").read_bytes())
        found.update(repr(self.seconds).encode())
        for name in self.modules():
            spec = find_spec(name)
            assert spec is not None and spec.origin is not None
            source = Path(spec.origin).read_text()
            found.update(repr((name, what_runs(ast.parse(source)))).encode())
        return found.hexdigest()[:12]


def what_runs(part: object) -> object:
    """Return a syntax tree as tuples and lists, the same in every version of Python.

    Comments and docstrings are left out.
    """
    if isinstance(part, ast.AST):
        fields = [(name, what_runs(value)) for name, value in ast.iter_fields(part)]
        return type(part).__name__, [
            (name, value) for name, value in fields if value not in ((), None)
        ]
    if isinstance(part, list):
        return tuple(what_runs(each) for each in part if not _is_docstring(each))
    return part


def _is_docstring(part: object) -> bool:
    value = part.value if isinstance(part, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def to_markdown(title: str, origin: str, findings: Sequence[Findings]) -> str:
    """Return the tables, and the paper's statements beside ours; ``origin``: what gave them."""
    parts = [f"# {title}", f"**Simulated, not measured.** {origin}"]
    for each in findings:
        parts.append(f"## {each.figure} (simulated)")
        parts.append(markdown_table(each.columns, [list(map(_text, row)) for row in each.rows]))
        if each.claims:
            parts.append(markdown_table(("the paper's text", "paper", "ours"), each.claims))
    return "\n\n".join(parts) + "\n"


def _text(cell: Cell) -> str:
    return f"{cell:,.1f}" if isinstance(cell, float) else str(cell)
