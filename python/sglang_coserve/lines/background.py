"""Work in threads and processes that must reach its end, and tasks that are started again.

A task that nobody awaits can end without anybody's knowledge. So every task and thread that is to
last is started by a ``TaskSupervisor``: its failure is logged, counted, shown by ``state``, and
followed by another attempt. Only what somebody awaits soon is a task of its own elsewhere.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import random
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import IO, Any, Final, ParamSpec, TypeVar, cast

import orjson

from sglang_coserve.errors import CoserveError, StorageError


class Clock:
    """The system clock; tests give it another one."""

    def now_s(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``; not at all when negative."""
        await asyncio.sleep(max(0.0, seconds))


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


_MOST_SAID_BYTES: Final = 1 << 20
"""Most output of a process, as its JSON is parsed on the event loop. 100 faults take 30 kB."""


async def run_module(what: str, module: str, *arguments: str, **variables: str) -> Any:
    """Run ``python -m module`` and return the JSON that it prints, 1 MiB at the most.

    ``variables`` are added to its environment. Cancelling the call ends the process.

    Raises:
        StorageError: the process failed; the message begins with ``what``.
    """
    command = (sys.executable, "-m", module, *arguments)
    started: list[subprocess.Popen[bytes]] = []
    is_wanted = True

    def run() -> tuple[int, bytes, bytes]:
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            # A new session, so that Ctrl-C in the terminal reaches only the server.
            start_new_session=True,
            env={**os.environ, **variables},
        ) as process:
            started.append(process)
            if not is_wanted:
                process.kill()
            found, said = _bounded_output(process, _MOST_SAID_BYTES)
        return process.returncode, found, said

    # Not as an asyncio subprocess: uvloop forks, which blocks the event loop for 40 ms per
    # GiB of the server's memory. From a thread it takes half a millisecond.
    running = asyncio.get_running_loop().run_in_executor(None, run)
    try:
        status, found, said = await asyncio.shield(running)
    except OSError as error:
        raise StorageError(f"{what} could not begin: {error.strerror}") from error
    except asyncio.CancelledError:
        is_wanted = False
        for process in started:
            process.kill()
        await asyncio.wait({running})
        raise
    if status:
        lines = said.decode(errors="replace").strip().splitlines() or ["no message"]
        raise StorageError(f"{what} ended with {status}: {lines[-1]}")
    return orjson.loads(found)


def _bounded_output(process: subprocess.Popen[bytes], most_bytes: int) -> tuple[bytes, bytes]:
    """Return what a process prints, and what it says of errors, until its end. Blocks.

    A process that prints more than ``most_bytes`` in all is killed.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    printed = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for pipe in printed:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                pipe = cast(IO[bytes], key.fileobj)
                piece = os.read(key.fd, 1 << 16)
                printed[pipe] += piece
                if not piece:
                    selector.unregister(pipe)
                elif sum(map(len, printed.values())) > most_bytes:
                    process.kill()
                    process.wait()
                    return b"", f"it printed more than {most_bytes} bytes".encode()
    process.wait()
    return bytes(printed[process.stdout]), bytes(printed[process.stderr])


_FIRST_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 10.0
"""What a task does is late by so much once its cause of failure has gone; until then, to start it
again costs next to nothing."""

_LOG_AGAIN_S: Final = 3600.0
"""The same failure is logged as often; it is counted each time."""

_MOST_LOGGED: Final = 1024
"""Failures that are remembered as logged, by task and subject. With more of them, some are logged
once more."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _TaskState:
    """Of all tasks of one name."""

    running: int = 0
    """Those that run, or are about to be started again."""

    failures: int = 0
    """Since the start of the process."""

    last_error: str | None = None

    last_failure_at: float | None = None
    """Seconds since the epoch."""


class TaskSupervisor:
    """The long-lived tasks and threads of one process. ``note_failure`` and ``state`` may be called
    in any thread."""

    def __init__(self, clock: Clock | None = None, rng: random.Random | None = None) -> None:
        self._clock = clock or Clock()
        self._rng = rng or random.Random()
        self._lock = threading.Lock()
        self._states: dict[str, _TaskState] = {}
        self._logged: dict[tuple[str, str], tuple[str, float]] = {}

    def start(
        self, name: str, work: Callable[[], Awaitable[None]], subject: str = ""
    ) -> asyncio.Task[None]:
        """Await ``work()``, and again whenever it raises, until it returns or is cancelled.

        Pauses grow up to 10 s, and are short again once an attempt has lasted longer. ``name`` is
        one of few, ``subject`` what this task of several is about: it is logged.
        """
        # Not in the context of the request that starts it: that one's marks are not the task's.
        task = asyncio.get_running_loop().create_task(
            self._run(name, work, subject), name=name, context=contextvars.Context()
        )
        self._add_running(name, 1)
        # As a callback: a task that is cancelled before it starts runs no code.
        task.add_done_callback(lambda _: self._add_running(name, -1))
        return task

    @asynccontextmanager
    async def running(self, name: str, work: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
        """``start`` it, and cancel it at the end of the context."""
        task = self.start(name, work)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    def start_thread(self, name: str, work: Callable[[], None]) -> None:
        """The same in a thread, which ends with the process."""
        self._add_running(name, 1)
        threading.Thread(
            target=self._run_thread, args=(name, work), name=f"coserve-{name}", daemon=True
        ).start()

    def note_failure(self, name: str, error: BaseException, subject: str = "") -> None:
        """Count and log a failure that has ended no task."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        text, now_s = f"{type(error).__name__}: {error}", self._clock.now_s()
        with self._lock:
            state = self._states.setdefault(name, _TaskState())
            state.failures += 1
            state.last_error, state.last_failure_at = text, now_s
            logged, logged_s = self._logged.get((name, subject), ("", 0.0))
            is_new = text != logged or now_s - logged_s >= _LOG_AGAIN_S
            if is_new:
                if len(self._logged) >= _MOST_LOGGED:
                    self._logged.clear()
                self._logged[name, subject] = (text, now_s)
        if is_new:
            what = f"{name} ({subject})" if subject else name
            # What is raised on purpose says all by itself.
            trace = None if isinstance(error, CoserveError) else error
            _log.error("%s failed and is tried again: %s", what, text, exc_info=trace)

    def state(self) -> dict[str, Any]:
        """Return by name how many tasks run, and how they have failed, as JSON values."""
        with self._lock:
            return {name: asdict(state) for name, state in sorted(self._states.items())}

    async def _run(self, name: str, work: Callable[[], Awaitable[None]], subject: str) -> None:
        pauses = _Pauses(self._rng)
        while True:
            pauses.began()
            try:
                return await work()
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # Not this task is cancelled, but something that it awaited.
                self.note_failure(name, error, subject)
            except Exception as error:
                self.note_failure(name, error, subject)
            await self._clock.sleep(pauses.next_s())

    def _run_thread(self, name: str, work: Callable[[], None]) -> None:
        pauses = _Pauses(self._rng)
        while True:
            pauses.began()
            try:
                work()
                break
            except Exception as error:
                self.note_failure(name, error)
                time.sleep(pauses.next_s())
        self._add_running(name, -1)

    def _add_running(self, name: str, number: int) -> None:
        with self._lock:
            self._states.setdefault(name, _TaskState()).running += number


BACKGROUND_METRICS: Final = {
    "background_failures_total{task}": "Background tasks that failed and were started again.",
}
"""Metrics for Prometheus, with their labels, without ``coserve_``."""


def background_values(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of ``BACKGROUND_METRICS`` of a ``TaskSupervisor.state``."""
    return {"background_failures_total": {name: of["failures"] for name, of in tasks.items()}}


def backoff_s(failures: int, first_s: float, max_s: float, rng: random.Random) -> float:
    """Return the pause in seconds after the ``failures``-th consecutive failure, from 1.

    It doubles from ``first_s`` up to ``max_s``, and is reduced by up to half at random, so that
    requests that failed together are not retried together.
    """
    # The exponent is capped, because the float would overflow.
    return min(max_s, first_s * 2.0 ** min(failures - 1, 30)) * rng.uniform(0.5, 1.0)


class _Pauses:
    """The pauses between the attempts of one task."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._failures = 0
        self._began_s = 0.0

    def began(self) -> None:
        self._began_s = time.monotonic()

    def next_s(self) -> float:
        """Return the next one: the attempt has failed."""
        if time.monotonic() - self._began_s > _MAX_PAUSE_S:
            self._failures = 0
        self._failures += 1
        return backoff_s(self._failures, _FIRST_PAUSE_S, _MAX_PAUSE_S, self._rng)
