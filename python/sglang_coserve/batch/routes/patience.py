"""Aborts bodies of clients that stall, so that they do not hold resources for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.errors import CoserveError

__all__ = ["DownloadResponse", "SlowClientError", "received"]


class SlowClientError(CoserveError):
    """A body has stopped coming, or comes too slowly (HTTP 408)."""


async def received(chunks: AsyncIterator[bytes], limits: BatchLimits) -> AsyncGenerator[bytes]:
    """Yield ``chunks`` for as long as they keep coming; only waiting for the client counts.

    Raises:
        SlowClientError: nothing came for ``transfer_idle_s``, or ever less than
            ``min_transfer_bytes_per_s``.
    """
    loop = asyncio.get_running_loop()
    idle_s, rate = limits.transfer_idle_s, limits.min_transfer_bytes_per_s
    waited_s, size_bytes = 0.0, 0
    while True:
        began_s = loop.time()
        try:
            async with asyncio.timeout(min(idle_s, idle_s + size_bytes / rate - waited_s)):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise SlowClientError(
                f"the body stands still after {size_bytes:,} bytes: nothing came for "
                f"{idle_s:g} s, or less than {rate:,} bytes/s; send it again"
            ) from None
        waited_s += loop.time() - began_s
        size_bytes += len(chunk)
        yield chunk


class DownloadResponse(StreamingResponse):
    """Has a ``place`` until it ends, as it does when the client stops reading."""

    def __init__(
        self, *args: Any, place: AbstractContextManager[Any], limits: BatchLimits, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._place = place
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``StreamingResponse``."""
        with self._place:
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """See ``StreamingResponse``. What is cut off is seen to be, by ``content-length``."""
        idle_s, rate = self._limits.transfer_idle_s, self._limits.min_transfer_bytes_per_s

        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(idle_s + len(message.get("body", b"")) / rate):
                await send(message)

        try:
            await super().stream_response(send_soon)
        except TimeoutError:
            return
