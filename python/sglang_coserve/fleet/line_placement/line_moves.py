"""The interface to what moves running lines from one engine of a fleet to another."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from sglang_coserve.config.coserve import Pool
from sglang_coserve.http_lines.engine_load import WantedLines


class Move(NamedTuple):
    """A decision: a line is to be asked back from the engine that has it."""

    line: Hashable
    to: str | None
    """The engine where the line goes on; None: any engine that begins lines."""


class LineMoves:
    """Moves nothing: every engine begins lines, and finishes its own.

    ``look`` decides; all other calls report what became of engines and lines.
    """

    def set_engine(self, name: str, pool: Pool | None, *, is_open: bool) -> Mapping[str, bool]:
        """Note whether an engine takes lines; return whether it begins new ones.

        The answer has every engine for which this may have changed.
        """
        return {name: is_open}

    def start(self, line: Hashable, engine: str, generated_tokens: int, now_s: float) -> None:
        """An engine begins with a line, or goes on with it."""

    def has_prompt(self, line: Hashable, tokens: int) -> None:
        """A line that an engine has can be asked back from it, and its prompt is so long."""

    def add_tokens(self, line: Hashable, new_tokens: int, now_s: float) -> None:
        """An engine has generated tokens of a line."""

    def move_of(self, line: Hashable) -> Move | None:
        """Return where a line that an engine has goes on now; None if it was not asked back."""

    def stay(self, line: Hashable) -> None:
        """A line stays in its engine, which was asked for it in vain."""

    def stop(self, line: Hashable) -> None:
        """An engine does not have a line any more."""

    def end(self, line: Hashable) -> None:
        """Forget a line that no engine has any more."""

    def look(
        self, engine: str, wants: WantedLines | None, waiting: int, now_s: float
    ) -> Sequence[Move]:
        """Return the lines that are to be asked back now.

        Args:
            engine: The name of an engine that takes lines.
            wants: What it says now that it would take over.
            waiting: Offline requests that wait in it now.
            now_s: Never earlier than in a call before.
        """
        return ()
