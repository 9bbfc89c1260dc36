"""Shows the current run and its progress."""

from __future__ import annotations

from typing import Self

from sglang_coserve.progress_bar import progress_bar

__all__ = ["SearchProgress"]


class SearchProgress:
    """A context manager with a progress bar on standard error, if that is a terminal."""

    def __init__(self, *, show: bool = True) -> None:
        self._bar = progress_bar(show=show)
        self._task = self._bar.add_task("")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, what: str, seconds: float | None = None) -> None:
        """Show a new activity, and its duration in (simulated) seconds, if known."""
        self._bar.reset(self._task, total=seconds, description=what)

    def tick(self, seconds: float) -> bool:
        """Show the progress; always return False, so that a simulation goes on."""
        self._bar.update(self._task, completed=seconds)
        return False
