"""A stand-in for an event loop, so that a coroutine can run in a worker thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

_T = TypeVar("_T")


class _ThreadLoop:
    """An event loop that runs functions for an executor at once, in the same thread."""

    async def run_in_executor(
        self, _executor: None, function: Callable[..., _T], *arguments: Any
    ) -> _T:
        return function(*arguments)


_LOOP: Final[Any] = _ThreadLoop()


@contextmanager
def thread_loop() -> Iterator[None]:
    """Set the stand-in loop, so that a coroutine that never really waits can run in this thread."""
    asyncio._set_running_loop(_LOOP)
    try:
        yield
    finally:
        asyncio._set_running_loop(None)
