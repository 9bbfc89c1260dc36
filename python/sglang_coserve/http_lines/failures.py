"""How an attempt at a line ends without an answer; none of it is the line's fault."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from sglang_coserve.errors import ServerError
from sglang_coserve.lines.backend import MovedKv

__all__ = ["EngineLostError", "EngineRefusesError", "LineMovedError", "refusal_text"]

_KEYS: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class LineMovedError(ServerError):
    """The engine gives the line back, or does not take it: it drains, or has another model.

    The line goes on elsewhere, with the tokens that were received.
    """

    def __init__(self, message: str, kv: MovedKv | None = None) -> None:
        super().__init__(message)
        self.kv = kv
        """What the engine has left of it."""


class EngineLostError(ServerError):
    """The engine cannot be reached, has ended, or says nothing any more."""

    def __init__(self, message: str, *, had_the_line: bool) -> None:
        super().__init__(message)
        self.had_the_line = had_the_line
        """False when it surely never got it."""


class EngineRefusesError(ServerError):
    """The engine is there and does not speak with us: the wrong key, or another program."""


def refusal_text(address: str, status: int, content: bytes) -> str:
    """Return what an answer other than 200 says, and how to mend it."""
    hint = ""
    if status in _KEYS:
        hint = ": its --admin-api-key is not the gateway's --engine-admin-key"
    elif status == HTTPStatus.NOT_FOUND:
        hint = ": it is no server of sglang_coserve, or has no --admin-api-key"
    text = content[:300].decode(errors="replace").strip()
    return f"{address} answers HTTP {status}{hint} ({text})"
