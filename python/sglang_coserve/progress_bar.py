"""The bar of long operations, the same for all of them."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

__all__ = ["progress_bar"]


def progress_bar(*, show: bool = True, shows_percent: bool = True) -> Progress:
    """Return a bar on standard error that leaves nothing behind; silent off a terminal."""
    console = Console(stderr=True)
    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False), BarColumn()]
    if shows_percent:
        columns.append(TaskProgressColumn())
    return Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (show and console.is_terminal),
    )
