"""How the online users of each engine stand, asked for when somebody wants to see it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from sglang_coserve.batch.routes import VIEW_PATH
from sglang_coserve.errors import RequestError, ServerError
from sglang_coserve.fleet.engine import EngineState, RemoteEngine
from sglang_coserve.http_lines.messages import decode_message

__all__ = ["EngineViews", "OnlineUsers"]

_PATH: Final = f"{VIEW_PATH}?since={1 << 40}"
"""Without the history, which is of a time before."""

_FRESH_S: Final = 1.0
"""As long as an engine's own sample: however many look, it is asked once."""

_TIMEOUT_S: Final = 3.0
"""Who looks at the fleet is not to wait for an engine that hangs."""

_log = logging.getLogger(__name__)


class Bill(msgspec.Struct, frozen=True):
    """What offline work cost them, as ``History.bill`` has it."""

    requests: float = 0
    mean_ms: float = 0.0
    ttft_ms: float = 0.0
    gaps_ms: float = 0.0


class OnlineUsers(msgspec.Struct, frozen=True):
    """What an engine says of them, as ``view.standing`` has it; it may be of another version."""

    level: str
    text: str = ""
    requests: int = 0
    bill: Bill | None = None


class _EngineView(msgspec.Struct, frozen=True):
    online_users: OnlineUsers


class EngineViews:
    """Asks engines as their operator, which the gateway is: it has their admin key."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._asking: asyncio.Task[Mapping[str, OnlineUsers]] | None = None
        self._asked_s = 0.0

    async def online_users(self, engines: Iterable[RemoteEngine]) -> Mapping[str, OnlineUsers]:
        """Return what is known, by the engines' addresses; at most one second old."""
        now_s = self._monotonic_s()
        if self._asking is None or now_s - self._asked_s >= _FRESH_S:
            self._asked_s = now_s
            self._asking = asyncio.create_task(_ask_all(list(engines)))
        # One who does not wait any more is not to take the answer from the others.
        return await asyncio.shield(self._asking)


async def _ask_all(engines: list[RemoteEngine]) -> Mapping[str, OnlineUsers]:
    there = [engine for engine in engines if engine.state is not EngineState.DOWN]
    found = await asyncio.gather(*map(_ask, there))
    return {
        engine.url: users for engine, users in zip(there, found, strict=True) if users is not None
    }


async def _ask(engine: RemoteEngine) -> OnlineUsers | None:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            content = await engine.connection.ask(_PATH)
        return decode_message(content, _EngineView).online_users
    except (TimeoutError, ServerError, RequestError) as error:
        _log.debug("%s does not say how its online users stand: %s", engine.url, error)
        return None
