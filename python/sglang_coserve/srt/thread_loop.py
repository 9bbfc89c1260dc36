"""The event loop that SGLang's handlers find in a thread of ours.

Since 0.5.22 SGLang has a request converted beside the event loop. In a thread it is beside it
already, and there is no loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

__all__ = ["thread_loop"]

_T = TypeVar("_T")


class _ThreadLoop:
    """Runs at once what it is given."""

    async def run_in_executor(
        self, _executor: None, function: Callable[..., _T], *arguments: Any
    ) -> _T:
        return function(*arguments)


_LOOP: Final[Any] = _ThreadLoop()


@contextmanager
def thread_loop() -> Iterator[None]:
    """Within it, a coroutine that waits for nothing else can be run in this thread."""
    asyncio._set_running_loop(_LOOP)
    try:
        yield
    finally:
        asyncio._set_running_loop(None)
