"""What was measured, against what it should be."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from common.results import write_results
from sglang_coserve.tables import markdown_table

__all__ = ["Figure", "all_met", "markdown", "report"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity, measured once or more."""

    name: str
    unit: str
    values: tuple[float, ...]
    """One for each repeat, in their order."""

    at_least: float | None = None
    at_most: float | None = None
    """What the median should be; both None when it is there to be known only."""

    def __post_init__(self) -> None:
        assert self.values, f"{self.name} was never measured"

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool | None:
        """Whether the median is what it should be; None when nothing is asked of it."""
        if self.at_least is not None:
            return self.median >= self.at_least
        return None if self.at_most is None else self.median <= self.at_most

    def to_dict(self) -> dict[str, Any]:
        """Return the figure as plain JSON values."""
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "low": min(self.values),
            "high": max(self.values),
            "values": list(self.values),
            "at_least": self.at_least,
            "at_most": self.at_most,
            "is_met": self.is_met,
        }


def all_met(figures: Iterable[Figure]) -> bool:
    """Return whether none of the figures misses what it should be."""
    return all(figure.is_met is not False for figure in figures)


def markdown(figures: Sequence[Figure]) -> str:
    """Return the figures as a Markdown table."""
    columns = ("figure", "median", "range", "n", "target", "met")
    return markdown_table(columns, [_cells(figure) for figure in figures])


def report(
    figures: Sequence[Figure], options: Namespace, examples: Sequence[str] = (), **more: Any
) -> None:
    """Write results.json and table.md to ``options.out``, and print the table and examples.

    ``more`` are other entries of results.json.
    """
    entries = {**more, "examples": list(examples)} if examples else more
    write_results(
        options.out / "results.json",
        options,
        figures=[figure.to_dict() for figure in figures],
        **entries,
    )
    table = markdown(figures)
    (options.out / "table.md").write_text(table + "\n")
    console = Console()
    console.print(Markdown(table))
    for example in examples:
        console.print(example, markup=False, highlight=False)


def _cells(figure: Figure) -> list[str]:
    low, high = min(figure.values), max(figure.values)
    return [
        figure.name,
        f"{_number(figure.median)} {figure.unit}".strip(),
        "" if low == high else f"{_number(low)}–{_number(high)}",
        str(len(figure.values)),
        _target(figure),
        {True: "yes", False: "**no**", None: ""}[figure.is_met],
    ]


def _target(figure: Figure) -> str:
    if figure.at_least is not None:
        return f"≥ {_number(figure.at_least)}"
    return "" if figure.at_most is None else f"≤ {_number(figure.at_most)}"


def _number(value: float) -> str:
    """Three significant digits, whole numbers in full."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
