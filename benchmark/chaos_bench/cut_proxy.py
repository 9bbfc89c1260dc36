"""Proxies before the engines of a fleet, whose connections can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Final, Self

from anyio.from_thread import start_blocking_portal

_PIECE_BYTES: Final = 1 << 16


class CutConnections:
    """Passes bytes on to an engine, until the connections are cut. An async context manager."""

    def __init__(self, engine_port: int) -> None:
        """Take the port of the engine; nothing listens yet."""
        self._engine_port = engine_port
        self._writers: set[asyncio.StreamWriter] = set()
        self.is_away = False
        """New connections are cut at once."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Cut all connections that there are now."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_away:
            writer.transport.abort()
            return
        self._writers.add(writer)
        with suppress(OSError):
            there_reader, there = await asyncio.open_connection("127.0.0.1", self._engine_port)
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


class CutProxies:
    """``CutConnections`` for each engine, in a thread of their own. A context manager."""

    def __init__(self, engine_ports: Sequence[int]) -> None:
        """Take the ports of the engines; nothing listens yet."""
        self._proxies = [CutConnections(port) for port in engine_ports]
        self._stack = ExitStack()
        self.urls: list[str] = []
        """Addresses of the proxies, in the order of the engines."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal(name="cut_proxies"))
            for proxy in self._proxies:
                stack.enter_context(self._portal.wrap_async_context_manager(proxy))
                self.urls.append(proxy.url)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def cut(self) -> None:
        """Cut all connections that there are now. May be called in any thread."""
        for proxy in self._proxies:
            self._portal.call(proxy.cut)
