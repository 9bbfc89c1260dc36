"""A server without work: what a request costs here whatever the server does that is measured."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import socket
from contextlib import suppress
from typing import Final, Self

__all__ = ["NullServer"]

_ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_JOIN_TIMEOUT_S: Final = 10.0


class NullServer:
    """Answers every request without a body at once, in a process of its own.

    The machine that runs the server, the clients and the probes is busy: an answer that is late
    may have waited for a core, and the one who asked may have read it late.
    """

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.base_url: Final = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_run, args=(self._socket,), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self._socket.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join(_JOIN_TIMEOUT_S)


def _run(listening: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Whoever started this process ends it.
    asyncio.run(_serve(listening))


async def _serve(listening: socket.socket) -> None:
    server = await asyncio.start_server(_answer, sock=listening)
    await server.serve_forever()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(_ANSWER)
            await writer.drain()
    writer.close()
