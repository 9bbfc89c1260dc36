"""The bar of long operations, the same for all of them."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from sglang_coserve.interrupts import StopOnInterrupt

__all__ = ["StoppableBar", "progress_bar"]


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


class StoppableBar:
    """A context manager with a bar for one task, during which SIGINT asks for a stop.

    The first SIGINT requests a stop, a second one interrupts as usual. Only the
    main thread may enter it.
    """

    def __init__(self, bar: Progress, task: str, total: float | None = None) -> None:
        self._stop = StopOnInterrupt()
        self._bar = bar
        self._task = bar.add_task(task, total=total)

    def __enter__(self) -> Self:
        self._stop.__enter__()
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        self._stop.__exit__(*error)

    @property
    def is_interrupted(self) -> bool:
        """True after SIGINT."""
        return self._stop.is_interrupted
