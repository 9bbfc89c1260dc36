"""One experiment of a paper: what runs, what came of it, and what the paper states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_coserve.tables import markdown_table

__all__ = ["Cell", "Claim", "Conditions", "Experiment", "Findings", "to_json", "to_markdown"]

Cell = str | float | int


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the command line says of every run."""

    seconds: float
    """Simulated."""

    trace: Path | None = None
    """Azure's conversation trace; None: the bundled sample."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One statement of a paper's text and what the simulation gives."""

    what: str
    paper: str
    ours: str
    why: str = ""
    """Why they differ, if they do."""


@dataclass(frozen=True, slots=True)
class Findings:
    """One figure or table of a paper."""

    figure: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    claims: Sequence[Claim] = ()


@dataclass(frozen=True, slots=True)
class Experiment:
    """What ``bench_papers.py`` runs under a name."""

    title: str
    measure: Callable[[Conditions], Iterator[Findings]]
    seconds: float = 120.0
    """Simulated time of a run, unless the command line says otherwise."""


def to_json(findings: Sequence[Findings]) -> list[dict[str, Any]]:
    """Return plain JSON values; what is not a number is null."""
    return [
        {
            "figure": each.figure,
            "columns": list(each.columns),
            "rows": [[_plain(cell) for cell in row] for row in each.rows],
            "claims": [asdict(claim) for claim in each.claims],
        }
        for each in findings
    ]


def to_markdown(title: str, command: str, findings: Sequence[Findings]) -> str:
    """Return the tables, and the paper's statements beside ours."""
    parts = [f"# {title}", f"**Simulated, not measured.** `{command}`"]
    for each in findings:
        parts.append(f"## {each.figure} (simulated)")
        parts.append(markdown_table(each.columns, [list(map(_text, row)) for row in each.rows]))
        if each.claims:
            claims = [[claim.what, claim.paper, claim.ours, claim.why] for claim in each.claims]
            parts.append(
                markdown_table(("the paper's text", "paper", "ours", "why they differ"), claims)
            )
    return "\n\n".join(parts) + "\n"


def _plain(cell: Cell) -> Cell | None:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _text(cell: Cell) -> str:
    return f"{cell:,.1f}" if isinstance(cell, float) else str(cell)
