"""HTTP connections whose bytes are parsed a little at a time."""

from __future__ import annotations

import time
from typing import Any, Final

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["PacedProtocol", "install_paced_protocol"]

_TURN_S: Final = 0.001
"""Then others have a turn. On an AMD EPYC 100 kB of plain body are parsed in it, or 40 chunks."""

_LEAST_BYTES: Final = 256
_FIRST_BYTES: Final = 1 << 12
_MOST_BYTES: Final = 1 << 14
"""Parsed at once, as it proves fast. As chunks of one byte they take 0.4, 6 and 25 ms there."""


class PacedProtocol(H11Protocol):
    """Uvicorn's, but bytes that were received together do not stop the event loop for long.

    Uvicorn parses what it has received in one call, up to 256 KiB, in Python. Where that are
    chunks of one byte, each with its length, the call takes more than a second.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unparsed = bytearray()
        self._is_behind = False
        self._piece_bytes = _FIRST_BYTES

    def data_received(self, data: bytes) -> None:
        """Take in what was received."""
        self._unparsed += data
        if not self._is_behind:
            self._parse()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget what is not parsed: nobody waits for an answer to it."""
        self._unparsed.clear()
        super().connection_lost(exc)

    def _parse(self) -> None:
        end_s = time.perf_counter() + _TURN_S
        while self._unparsed:
            piece = bytes(self._unparsed[: self._piece_bytes])
            del self._unparsed[: self._piece_bytes]
            super().data_received(piece)
            if self.transport.is_closing():
                self._unparsed.clear()
            elif time.perf_counter() > end_s:
                self._piece_bytes = max(self._piece_bytes // 2, _LEAST_BYTES)
                break
            else:
                self._piece_bytes = min(2 * self._piece_bytes, _MOST_BYTES)
        was_behind, self._is_behind = self._is_behind, bool(self._unparsed)
        if self._is_behind:
            self.transport.pause_reading()
            self.loop.call_soon(self._parse)
        elif was_behind and not (self.flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()


def install_paced_protocol() -> None:
    """Have every server of this process use ``PacedProtocol`` that names no protocol."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{PacedProtocol.__name__}"
