"""A server without work: what a request costs here whatever the server does that is measured."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import signal
import socket
from contextlib import suppress
from typing import Final, Self

__all__ = ["NullServer"]

_BODY: Final = b'{"id": "file-null"}'
_ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    % (len(_BODY), _BODY)
)
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_READ_BYTES: Final = 1 << 18
_JOIN_TIMEOUT_S: Final = 10.0


class NullServer:
    """Reads what it is sent, drops it and answers at once, in a process of its own.

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
    server = await asyncio.start_server(_answer, sock=listening, limit=_READ_BYTES)
    await server.serve_forever()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            found = _LENGTH.search(head)
            left_bytes = int(found[1]) if found else 0
            while left_bytes:
                content = await reader.read(min(left_bytes, _READ_BYTES))
                if not content:
                    break
                left_bytes -= len(content)
            writer.write(_ANSWER)
            await writer.drain()
    writer.close()
