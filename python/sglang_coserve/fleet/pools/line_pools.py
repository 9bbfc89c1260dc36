"""Moves running lines between engines that begin them and engines with online requests (OOCO §3.2).

Lines begin at relaxed engines and at engines of no pool. A strict engine serves online requests. It
names the lengths of running lines that it would take over (``core.migration``), and gets the best
of the relaxed engines' lines. When the strict engine has no room for them any more, they go back.
Lines that no strict engine wants end where they began.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final

from sglang_coserve.config.coserve import Pool
from sglang_coserve.core.migration import requests_to_pull
from sglang_coserve.fleet.line_placement.line_moves import LineMoves, Move
from sglang_coserve.http_lines.engine_load import WantedLines

_ARRIVES_S: Final = 10.0
"""A line that was taken over may be silent for so long: an engine gives up reading its KV then
(``srt.kv_moves``). Later it waits for room like any other."""


@dataclass(slots=True, eq=False)
class _RunningLine:
    engine: str
    tokens: int
    """Context tokens, as far as known."""

    since_s: float
    """When it last generated a token, or else began here."""

    has_generated: bool = False
    """True once this engine has generated tokens of the line."""

    is_movable: bool = False
    move: Move | None = None


class LinePools(LineMoves):
    """The lines that engines have, and which pool each engine is of."""

    def __init__(self) -> None:
        self._open: dict[str, Pool | None] = {}
        self._lines: dict[Hashable, _RunningLine] = {}
        self._prompts: dict[Hashable, int] = {}
        self._waited: dict[str, int] = {}
        """Offline requests that waited in a strict engine when it was looked at last."""

    def set_engine(self, name: str, pool: Pool | None, *, is_open: bool) -> Mapping[str, bool]:
        """See ``LineMoves.set_engine``."""
        before = self._strict_ones_begin
        self._open.pop(name, None)
        if is_open:
            self._open[name] = pool
        told = [name]
        if before is not self._strict_ones_begin:
            told += [each for each, pool in self._open.items() if pool == "strict"]
        return {each: self.begins_lines(each) for each in told}

    def begins_lines(self, name: str) -> bool:
        """Return whether new lines go to an engine: to strict ones only if there are no others."""
        return name in self._open and (self._open[name] != "strict" or self._strict_ones_begin)

    @property
    def _strict_ones_begin(self) -> bool:
        return all(pool == "strict" for pool in self._open.values())

    def start(self, line: Hashable, engine: str, generated_tokens: int, now_s: float) -> None:
        """See ``LineMoves.start``."""
        tokens = self._prompts.get(line, 0) + generated_tokens
        self._lines[line] = _RunningLine(engine, tokens, now_s)

    def has_prompt(self, line: Hashable, tokens: int) -> None:
        """See ``LineMoves.has_prompt``."""
        running = self._lines[line]
        running.tokens += tokens - self._prompts.get(line, 0)
        running.is_movable = True
        self._prompts[line] = tokens

    def add_tokens(self, line: Hashable, new_tokens: int, now_s: float) -> None:
        """See ``LineMoves.add_tokens``."""
        running = self._lines[line]
        running.tokens += new_tokens
        running.has_generated, running.since_s = True, now_s

    def move_of(self, line: Hashable) -> Move | None:
        """See ``LineMoves.move_of``: to no engine that does not take lines over any more."""
        move = self._lines[line].move
        if move is None or move.to is None or self._open.get(move.to) == "strict":
            return move
        return Move(line, None)

    def stay(self, line: Hashable) -> None:
        """See ``LineMoves.stay``."""
        if line in self._lines:
            self._lines[line].move = None

    def stop(self, line: Hashable) -> None:
        """See ``LineMoves.stop``."""
        del self._lines[line]

    def end(self, line: Hashable) -> None:
        """See ``LineMoves.end``."""
        self._prompts.pop(line, None)

    def look(
        self, engine: str, wants: WantedLines | None, waiting: int, now_s: float
    ) -> list[Move]:
        """See ``LineMoves.look``: what a strict engine takes over or gives back; others never do
        either. O(lines log lines)."""
        waited = self._waited.get(engine, 0)
        self._waited[engine] = waiting
        if self._open.get(engine) != "strict" or self._strict_ones_begin:
            return []
        if wants is not None:
            return self._pull(engine, wants)
        return self._give_back(engine, min(waiting, waited), now_s)

    def _pull(self, engine: str, wants: WantedLines) -> list[Move]:
        coming = [
            line
            for line in self._lines.values()
            if (line.move is not None and line.move.to == engine)
            or (line.engine == engine and not line.has_generated)
        ]
        lengths = {
            name: line.tokens
            for name, line in self._lines.items()
            if line.is_movable and line.move is None and self._open.get(line.engine) == "relaxed"
        }
        pulled = requests_to_pull(
            lengths,
            wants.tokens,
            wants.max_tokens,
            most=wants.lines - len(coming),
            coming_tokens=sum(line.tokens for line in coming),
        )
        return [self._move(name, engine) for name in pulled]

    def _give_back(self, engine: str, count: int, now_s: float) -> list[Move]:
        """Give back as many as have waited, those whose last token is the oldest."""
        silent: list[tuple[float, Hashable]] = []
        for name, line in self._lines.items():
            if line.engine != engine:
                continue
            since_s = line.since_s if line.has_generated else line.since_s + _ARRIVES_S
            if line.move is not None or since_s > now_s:
                count -= 1  # It leaves, or is on its way: one of those that wait.
            else:
                silent.append((since_s, name))
        silent.sort(key=lambda each: each[0])
        return [self._move(name, None) for _, name in silent[: max(0, count)]]

    def _move(self, name: Hashable, to: str | None) -> Move:
        move = self._lines[name].move = Move(name, to)
        return move
