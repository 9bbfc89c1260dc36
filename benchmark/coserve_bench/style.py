"""How figures look: one colour and one marker for each system, the same in all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from coserve_bench.systems import SYSTEMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Style", "new_figure", "style_of"]

# Okabe and Ito's palette, made to be told apart with any colour vision; without
# its yellow, which is too pale for lines.
_COLORS: Final = ("#000000", "#E69F00", "#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2")
_MARKERS: Final = "osD^vPX*<>"
_LINES: Final = ("-", "--", ":", "-.")
_FILLS: Final = ("full", "none", "left", "top")


@dataclass(frozen=True, slots=True)
class Style:
    """How a system, under one SLO, is drawn."""

    color: str
    marker: str
    line: str
    fill: str
    """Of the marker, where no line tells SLOs apart."""


def style_of(system: str, variant: int = 0) -> Style:
    """Return the style of a system, which does not depend on what else is drawn."""
    place = list(SYSTEMS).index(system)
    return Style(
        _COLORS[place % len(_COLORS)],
        _MARKERS[place % len(_MARKERS)],
        _LINES[variant % len(_LINES)],
        _FILLS[variant % len(_FILLS)],
    )


def new_figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, Any]:
    """Return a figure and its panels: one, a row or column of them, or a grid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=rows > 1)
