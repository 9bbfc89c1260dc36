"""Parses received HTTP bytes in small pieces, so that the event loop is not blocked."""

from __future__ import annotations

import time
from typing import Any, Final

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["PacedProtocol", "install_paced_protocol"]

_TURN_S: Final = 0.001
"""Parsing time after which the event loop runs other tasks. On an AMD EPYC 100 kB of plain body, or
40 chunks, are parsed in it."""

_LEAST_BYTES: Final = 256
_FIRST_BYTES: Final = 1 << 12
_MOST_BYTES: Final = 1 << 14
"""Least, initial and largest number of bytes parsed at once, adapted to the measured speed. As
chunks of one byte they take 0.4, 6 and 25 ms on that machine."""


class PacedProtocol(H11Protocol):
    """Uvicorn's HTTP protocol, with parsing spread over several turns of the event loop.

    Uvicorn parses all received bytes, up to 256 KiB, in one call, in Python. If these are
    chunks of one byte each, the call takes more than a second.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unparsed = bytearray()
        self._is_behind = False
        self._piece_bytes = _FIRST_BYTES

    def data_received(self, data: bytes) -> None:
        """Buffer received bytes, and parse them unless parsing is behind already."""
        self._unparsed += data
        if not self._is_behind:
            self._parse()

    def connection_lost(self, exc: Exception | None) -> None:
        """Discard bytes not yet parsed: nobody waits for a response."""
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
    """Make ``PacedProtocol`` uvicorn's default HTTP protocol in this process."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{PacedProtocol.__name__}"
