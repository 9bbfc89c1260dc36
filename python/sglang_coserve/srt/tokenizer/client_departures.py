"""Ends what a client has in the engine as soon as the client has gone.

SGLang asks whether the client of an unfinished request is still there only every four seconds, and
after a step. What it computes until then is for nobody: in that time a request that waits, or whose
prefill is suspended, holds its place before others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Final

__all__ = ["ClientDepartures"]


class _Call:
    """What one HTTP request has in the engine."""

    def __init__(self) -> None:
        self.rids: list[str] = []
        self.has_left = False
        """Whether its client has."""


_CALL: Final[ContextVar[_Call | None]] = ContextVar("what is served", default=None)


class ClientDepartures:
    """Watches the connection of each HTTP request while it is served."""

    def __init__(self, abort: Callable[[str], None]) -> None:
        """``abort`` ends the request of an id, and ignores one that has ended."""
        self._abort = abort

    @asynccontextmanager
    async def watched(self, request: Any) -> AsyncGenerator[None]:
        """Abort what is sent within this context when the client of ``request`` leaves.

        Args:
            request: A Starlette request whose body has been read. Others, and None, have no
                connection to watch.
        """
        if not hasattr(request, "receive"):
            _CALL.set(None)
            yield
            return
        call = _Call()
        _CALL.set(call)
        watching = asyncio.create_task(self._watch(request, call))
        try:
            yield
        finally:
            watching.cancel()

    def sending(self, rid: str) -> None:
        """Note that a request is about to be sent to the engine for the client of this context.

        Raises:
            ValueError: the client has left.
        """
        call = _CALL.get()
        if call is None:
            return
        if call.has_left:
            raise ValueError(f"request {rid} is not sent to the engine: its client has left")
        call.rids.append(rid)

    async def _watch(self, request: Any, call: _Call) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        call.has_left = True
        for rid in call.rids:
            self._abort(rid)
