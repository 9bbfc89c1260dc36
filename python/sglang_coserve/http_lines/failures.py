"""How an attempt at a line ends without an answer; none of it is the line's fault."""

from __future__ import annotations

from sglang_coserve.errors import ServerError

__all__ = ["EngineLostError", "EngineRefusesError", "LineMovedError"]


class LineMovedError(ServerError):
    """The engine gives the line back, or does not take it: it drains, or has another model.

    The line goes on elsewhere, with the tokens that were heard.
    """


class EngineLostError(ServerError):
    """The engine cannot be reached, has ended, or says nothing any more."""

    def __init__(self, message: str, *, had_the_line: bool) -> None:
        super().__init__(message)
        self.had_the_line = had_the_line
        """False when it surely never got it."""


class EngineRefusesError(ServerError):
    """The engine is there and does not speak with us: the wrong key, or another program."""
