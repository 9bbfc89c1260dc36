"""Runs blocking work in threads, off the event loop, and what else must not be left half done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

__all__ = ["WorkerThreads", "to_its_end"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class WorkerThreads:
    """A small pool of threads."""

    def __init__(self, name: str, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return ``work(*args, **kwargs)``, called in one of the threads.

        A thread cannot be stopped: a cancelled call returns only when ``work`` has ended,
        so that a repeated call never runs concurrently with it.
        """
        loop = asyncio.get_running_loop()
        return await to_its_end(loop.run_in_executor(self._executor, lambda: work(*args, **kwargs)))

    async def close(self) -> None:
        """Wait for running work and end the threads."""
        await asyncio.to_thread(self._executor.shutdown)


async def to_its_end(work: Awaitable[_T]) -> _T:
    """Return what ``work`` returns, or raises.

    If the caller is cancelled meanwhile, however often, ``work`` goes on, and the cancellation is
    raised once it has ended.
    """
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({future})
        if not future.cancelled():
            # Retrieve the exception, or asyncio would log that it was never retrieved.
            future.exception()
        raise
