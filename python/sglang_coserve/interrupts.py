"""Signals that end a command in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

__all__ = ["StopOnInterrupt", "terminate_as_interrupt"]


class StopOnInterrupt:
    """A context in which the first SIGINT asks for a stop; a second one interrupts as usual.

    Only the main thread may enter it.
    """

    def __init__(self) -> None:
        self.is_interrupted = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *error: object) -> None:
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
