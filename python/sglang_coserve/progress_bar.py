"""The progress of long operations: a bar on a terminal, otherwise occasional lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, Self

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

__all__ = ["StoppableBar"]

_LINE_INTERVAL_S: Final = 10.0
"""Interval of progress lines, as in ``coserve submit``."""


class StoppableBar:
    """A context manager with a bar for one task, during which SIGINT asks for a stop.

    The bar is on standard error and leaves nothing behind. Where that is no terminal there are
    lines instead. The first SIGINT requests a stop, a second one interrupts as usual. Only the
    main thread may enter it.
    """

    def __init__(
        self,
        task: str,
        total: float | None = None,
        *,
        show: bool = True,
        shows_percent: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``show``: without it there are neither bar nor lines."""
        console = Console(stderr=True)
        columns: list[ProgressColumn] = [
            TextColumn("{task.description}", markup=False),
            BarColumn(),
        ]
        if shows_percent:
            columns.append(TaskProgressColumn())
        self._bar = Progress(
            *columns,
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (show and console.is_terminal),
        )
        self._task = self._bar.add_task(task, total=total)
        self._stop = StopOnInterrupt()
        self._clock = clock
        self._writes_lines = show and not console.is_terminal
        self._line_s = clock()

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

    def _line(self, text: Callable[[], str]) -> None:
        """Write a line, if none was written for a while."""
        if self._writes_lines and self._clock() >= self._line_s + _LINE_INTERVAL_S:
            self._line_s = self._clock()
            sys.stderr.write(f"{text()}\n")
            sys.stderr.flush()
