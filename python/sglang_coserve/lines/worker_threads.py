"""Runs blocking work in threads, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["WorkerThreads"]

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
        future = loop.run_in_executor(self._executor, lambda: work(*args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                try:
                    await asyncio.wait({future})
                except asyncio.CancelledError:
                    continue
            # Retrieve the exception, or asyncio would log that it was never retrieved.
            future.exception()
            raise

    async def close(self) -> None:
        """Wait for running work and end the threads."""
        await asyncio.to_thread(self._executor.shutdown)
