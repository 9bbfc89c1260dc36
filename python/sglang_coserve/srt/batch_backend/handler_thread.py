"""SGLang's handlers run in a thread, their generation on the event loop.

What a handler does before and after it generates takes as long as a request is large:
prompts are rendered and tokenized, answers become objects and JSON. A coroutine needs no
event loop for that; it is continued step by step in a thread, and whatever it has to wait for
is awaited on the loop in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from sglang_coserve.guard.prompts import thread_loop
from sglang_coserve.lines.worker_threads import WorkerThreads

__all__ = ["HandlerThread", "OnLoop"]

_T = TypeVar("_T")


class OnLoop:
    """Awaited by a coroutine in the thread: what ``make()`` returns is awaited on the loop."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.make = make

    def __await__(self) -> Generator[OnLoop, Any, Any]:
        return (yield self)


@dataclass(frozen=True, slots=True)
class _Done(Generic[_T]):
    value: _T


class HandlerThread:
    """One thread, so that no two handlers are in the middle of a step: they share objects that
    were made for one event loop."""

    def __init__(self, name: str) -> None:
        self._thread = WorkerThreads(name, 1)  # Ends with the process.

    async def run(self, handler: Coroutine[Any, Any, _T]) -> _T:
        """Return what ``handler`` returns, which awaits nothing but ``OnLoop``.

        When the call is cancelled, so is at once what it waits for, and the handler is closed.
        """
        step: Callable[[], Any] = partial(handler.send, None)
        try:
            while True:
                state = await self._thread.run(_advanced, step)
                if isinstance(state, _Done):
                    value: _T = state.value
                    return value
                try:
                    step = partial(handler.send, await state.make())
                except Exception as error:
                    step = partial(handler.throw, error)
        finally:
            handler.close()


def _advanced(step: Callable[[], Any]) -> Any:
    """Continue a handler; return what it waits for, or ``_Done``."""
    try:
        with thread_loop():
            asked = step()
    except StopIteration as stop:
        return _Done(stop.value)
    if not isinstance(asked, OnLoop):
        raise RuntimeError(f"a handler waits for {asked!r}, which only an event loop could give")
    return asked
