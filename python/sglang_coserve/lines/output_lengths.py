"""How long the answers of a batch are, learned from its finished lines."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OutputLengths"]


@dataclass(slots=True)
class _Sum:
    lines: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.lines += 1
        self.tokens += tokens


class OutputLengths:
    """Means of finished lines, of those with a like limit as far as there are any.

    Before it is generated, little else tells the length of an answer: where the limits
    of lines say nothing of it, all lines are expected to be alike. Lines that are
    finished first are the short ones, so that the first means are too small.
    """

    def __init__(self) -> None:
        self._all = _Sum()
        self._by_limit: dict[int, _Sum] = {}
        """By the number of bits in the limit; 0 without one."""

    def add(self, limit: int | None, output_tokens: int) -> None:
        """Take in a line with this limit, or none, that was answered. O(1)."""
        self._all.add(output_tokens)
        self._by_limit.setdefault(_size(limit), _Sum()).add(output_tokens)

    def expected(self, limit: int | None) -> int | None:
        """Return the tokens to expect of a line; None before one was answered. O(1).

        ``limit`` is what the line sets on its answer; None when it sets none. The mean of
        all lines weighs as much as one with a like limit.
        """
        if not self._all.lines:
            return None
        mean = self._all.tokens / self._all.lines
        alike = self._by_limit.get(_size(limit), _Sum())
        tokens = round((alike.tokens + mean) / (alike.lines + 1))
        return tokens if limit is None else min(tokens, max(0, limit))


def _size(limit: int | None) -> int:
    return 0 if limit is None else max(0, limit).bit_length()
