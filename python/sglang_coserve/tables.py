"""Tables in Markdown, and figures in their cells."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["markdown_table", "median_and_range"]


def markdown_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, equal_widths: bool = False
) -> str:
    """Return a table, the first column to the left, the others to the right.

    ``equal_widths`` pads the cells, for a table that is read as it is, too.
    """
    lines = [columns, ["---", *("--:" for _ in columns[1:])], *rows]
    if equal_widths:
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        lines = [
            [
                cell.rjust(width) if place else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            for cells in lines
        ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def median_and_range(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Return the median of some values and, in brackets, the least and the largest if several."""
    low, middle, high = (
        form.format(value) for value in (min(values), statistics.median(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({low}–{high})"
