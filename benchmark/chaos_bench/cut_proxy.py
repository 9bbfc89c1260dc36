"""A proxy before each engine of a fleet, whose connections can be cut."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Self

_PIECE_BYTES: Final = 1 << 16
_READY_TIMEOUT_S: Final = 10.0


class CutProxy:
    """Passes bytes on to the ports of engines, each from a port of its own. A context manager."""

    def __init__(self, ports: Sequence[int]) -> None:
        """Take the ports of the engines; nothing listens yet."""
        self._engine_ports = ports
        self.ports: dict[int, int] = {}
        """The proxy's port by the engine's."""

        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        for port in self._engine_ports:
            listening = asyncio.run_coroutine_threadsafe(self._listen(port), self._loop)
            self.ports[port] = listening.result(_READY_TIMEOUT_S)
        return self

    def __exit__(self, *error: object) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_READY_TIMEOUT_S)

    def cut(self) -> None:
        """Cut all connections that there are now. May be called in any thread."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _listen(self, engine_port: int) -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(engine_port, reader, writer)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _serve(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._writers.add(writer)
        with suppress(OSError):
            there_reader, there = await asyncio.open_connection("127.0.0.1", port)
            self._writers.add(there)
            with suppress(OSError):
                await asyncio.gather(_copy(reader, there), _copy(there_reader, writer))
            self._writers.discard(there)
            there.transport.abort()
        self._writers.discard(writer)
        writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while content := await reader.read(_PIECE_BYTES):
        writer.write(content)
        await writer.drain()
    writer.transport.abort()
