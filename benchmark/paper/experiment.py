"""One experiment of a paper: what runs, what came of it, and what the paper states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_coserve.terminal import markdown_table

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


def to_markdown(title: str, origin: str, findings: Sequence[Findings]) -> str:
    """Return the tables, and the paper's statements beside ours; ``origin``: what gave them."""
    parts = [f"# {title}", f"**Simulated, not measured.** {origin}"]
    for each in findings:
        parts.append(f"## {each.figure} (simulated)")
        parts.append(markdown_table(each.columns, [list(map(_text, row)) for row in each.rows]))
        if each.claims:
            claims = [[claim.what, claim.paper, claim.ours, claim.why] for claim in each.claims]
            parts.append(
                markdown_table(("the paper's text", "paper", "ours", "why they differ"), claims)
            )
    return "\n\n".join(parts) + "\n"


def _text(cell: Cell) -> str:
    return f"{cell:,.1f}" if isinstance(cell, float) else str(cell)
