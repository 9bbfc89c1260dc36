"""What was seen and found, against what it should be."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from common.results import write_results
from sglang_coserve.errors import CoserveError
from sglang_coserve.terminal import markdown_table


@dataclass(frozen=True, slots=True)
class Observation:
    """One answer, one gap between two tokens of a stream, or one failure."""

    kind: str
    """``ping`` (a route without any work), ``health`` (one token), ``gap``, ``stream``, ``batch``
    (a call of the Batch API), or the name of what a storm sent."""

    start_s: float
    """On the monotonic clock, which all processes of the machine share; so is ``end_s``."""

    end_s: float
    status: int
    """Of HTTP; 0 for a connection that failed or broke."""

    is_different: bool = False
    """A stream ended well, but with another text than the undisturbed one."""

    detail: str = ""
    """The answer, if the observation is a failure. A probe has the times of the server's event loop
    here."""

    cpu_wait_ms: float = 0.0
    """Time for which the event loops of server and sender waited for a CPU, of a probe alone."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A time on the monotonic clock, which all processes of the machine share."""

    start_s: float
    end_s: float

    def overlaps(self, start_s: float, end_s: float) -> bool:
        """Tell whether anything of [``start_s``, ``end_s``] is within it."""
        return start_s <= self.end_s and end_s >= self.start_s


class ChaosError(CoserveError):
    """The server did not end, start or finish in time; what was seen so far is in the message."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity."""

    name: str
    value: float
    unit: str = ""
    at_most: float | None = None
    """What it should be; None when it is there to be known only."""

    @property
    def is_met(self) -> bool | None:
        """Whether it is what it should be; None when nothing is asked of it."""
        return None if self.at_most is None else self.value <= self.at_most


def markdown(figures: Sequence[Figure]) -> str:
    """Return the figures as a Markdown table."""
    rows = [
        [
            figure.name,
            f"{_number(figure.value)} {figure.unit}".strip(),
            "" if figure.at_most is None else f"≤ {_number(figure.at_most)}",
            {True: "yes", False: "**no**", None: ""}[figure.is_met],
        ]
        for figure in figures
    ]
    return markdown_table(("figure", "found", "target", "met"), rows)


def report(
    figures: Sequence[Figure], options: Namespace, examples: Sequence[str], **more: Any
) -> None:
    """Write results.json and table.md to ``options.out``, and print the table and examples.

    ``more`` are other entries of results.json.
    """
    found = [{**asdict(figure), "is_met": figure.is_met} for figure in figures]
    path = options.out / "results.json"
    write_results(path, options, figures=found, examples=list(examples), **more)
    table = markdown(figures)
    (options.out / "table.md").write_text(table + "\n")
    console = Console()
    console.print(Markdown(table))
    for example in examples:
        console.print(example, markup=False, highlight=False)


def _number(value: float) -> str:
    """Three significant digits, whole numbers in full."""
    return f"{value:,.0f}" if value == 0 or abs(value) >= 100 else f"{value:.3g}"
