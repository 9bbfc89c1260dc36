"""Threads for work that blocks, so that the event loop does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["WorkerThreads"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class WorkerThreads:
    """A few threads of one purpose."""

    def __init__(self, name: str, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return ``work(*args, **kwargs)``, called in one of the threads.

        A thread cannot be stopped: a cancelled call ends only when ``work`` has,
        so that what it writes is never written twice at the same time.
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
            # Nobody will ask what became of it; asyncio would complain of that.
            future.exception()
            raise

    async def close(self) -> None:
        """Wait for what was begun and end the threads."""
        await asyncio.to_thread(self._executor.shutdown)
