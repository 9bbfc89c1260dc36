"""Runs blocking work off the event loop, in threads and processes, and what else must not be left
half done."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO, Final, ParamSpec, TypeVar

import orjson

from sglang_coserve.errors import StorageError

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


_POLL_S: Final = 0.01
"""A tenth of the time that a process takes to start."""


async def run_module(
    what: str, module: str, *arguments: str, source: BinaryIO | None = None
) -> Any:
    """Run ``python -m module`` and return the JSON that it prints.

    ``source`` is its standard input, empty for None. Cancelling the call ends the process.

    Raises:
        StorageError: the process failed; the message begins with ``what``.
    """
    command = (sys.executable, "-m", module, *arguments)
    try:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaint:
            status = await _run(command, source, output, complaint)
            output.seek(0)
            complaint.seek(0)
            found, said = output.read(), complaint.read()
    except OSError as error:
        raise StorageError(f"{what} could not begin: {error.strerror}") from error
    if status:
        lines = said.decode(errors="replace").strip().splitlines() or ["no message"]
        raise StorageError(f"{what} ended with {status}: {lines[-1]}")
    return orjson.loads(found)


async def _run(
    command: tuple[str, ...], source: BinaryIO | None, output: Any, complaint: Any
) -> int:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if source is None else source,
            stdout=output,
            stderr=complaint,
            # A new session, so that Ctrl-C in the terminal reaches only the server.
            start_new_session=True,
        )

    # Not as an asyncio subprocess: uvloop forks, which blocks the event loop for 40 ms per
    # GiB of the server's memory. From a thread it takes half a millisecond.
    starting = asyncio.get_running_loop().run_in_executor(None, start)
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:
        # The process must end even if a second cancellation interrupts the wait.
        starting.add_done_callback(_end)
        await asyncio.wait({starting})
        raise
    try:
        while (status := process.poll()) is None:
            await asyncio.sleep(_POLL_S)
        return status
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()


def _end(starting: asyncio.Future[subprocess.Popen[bytes]]) -> None:
    """Kill a process whose caller was cancelled."""
    if starting.exception() is None:
        process = starting.result()
        process.kill()
        process.wait()
