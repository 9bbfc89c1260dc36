"""What commands have in common: text, tables and progress in a terminal, errors, and signals."""

from __future__ import annotations

import signal
import statistics
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from types import FrameType
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from sglang_coserve.errors import CoserveError

INTERRUPTED: Final = 130
"""The exit status after Ctrl-C, as shells number it."""


def exit_status(command: Callable[[], object]) -> int:
    """Run a server's command, tell an error of ours, and return the exit status."""
    try:
        command()
    except CoserveError as error:
        tell(error)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def tell(error: CoserveError) -> None:
    """Print an error, in as many lines as it has, on standard error."""
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)  # noqa: T201


_LINE_INTERVAL_S: Final = 10.0
"""Of lines that stand for a bar."""


def flag(default: Any, doc: str, *names: str, group: str | None = None, **option: Any) -> Any:
    """Return a field that is a flag of a command, its help being ``doc``, shown in ``group``.

    ``option`` is as ``typer.Option`` takes it.
    """
    option["rich_help_panel"] = group
    return field(default=default, metadata={"doc": doc, "names": names, "option": option})


_KEPT: Final = "\n\t"
_ESCAPED: Final = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
"""Categories of Unicode: controls, what is invisible or reorders the text, private use, halves of
pairs, and separators that some terminals break a line at."""


def printable(text: str) -> str:
    r"""Return ``text`` with an escape, as in ``\x1b``, for every character that is no text.

    What a server, a file or a user wrote could otherwise move the cursor, set the title
    or the clipboard, hide itself, or change what was printed before. Newlines and tabs
    stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        _escape(char) if unicodedata.category(char) in _ESCAPED and char not in _KEPT else char
        for char in text
    )


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


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


class ProgressBar:
    """A bar for one task on standard error, which leaves nothing behind; a context manager.

    Where that is no terminal there are lines instead, once in a while.
    """

    def __init__(
        self,
        task: str = "",
        total: float | None = None,
        *,
        show: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``show``: without it there are neither bar nor lines."""
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (show and console.is_terminal),
        )
        self._task = self._bar.add_task(task, total=total)
        self._clock = clock
        self._writes_lines = show and not console.is_terminal
        self._line_s = clock()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def _show(
        self,
        completed: float,
        line: Callable[[], str],
        *,
        text: str | None = None,
        total: float | None = None,
    ) -> None:
        """Show how much is done; ``line`` is written now if none was for a while.

        None leaves the text beside the bar, or the total, as it is.
        """
        self._bar.update(self._task, completed=completed, total=total, description=text)
        if self._writes_lines and self._clock() >= self._line_s + _LINE_INTERVAL_S:
            self._line_s = self._clock()
            sys.stderr.write(f"{line()}\n")
            sys.stderr.flush()


class StoppableBar(ProgressBar):
    """A bar during which the first SIGINT asks for a stop; a second one interrupts as usual.

    Only the main thread may enter it.
    """

    is_interrupted = False
    """True after SIGINT."""

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._interrupt)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        signal.signal(signal.SIGINT, self._previous)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.is_interrupted = True
        signal.signal(signal.SIGINT, self._previous)


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Within it SIGTERM ends the command as Ctrl-C does, so that no process stays behind."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
