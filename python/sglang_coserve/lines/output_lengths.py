"""Estimates the output lengths of a batch from its finished lines."""

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
    """Mean output lengths of finished lines, preferably of those with a similar limit.

    Little else predicts the length of an answer: if the limits are not informative, all lines
    are expected to be alike. Short lines finish
    first, so the first means are too small.
    """

    def __init__(self) -> None:
        self._all = _Sum()
        self._by_limit: dict[int, _Sum] = {}
        """Sums by the number of bits in the limit; 0 without a limit."""

    def add(self, limit: int | None, output_tokens: int) -> None:
        """Record an answered line with this limit, or without one. O(1)."""
        self._all.add(output_tokens)
        self._by_limit.setdefault(_size(limit), _Sum()).add(output_tokens)

    def expected(self, limit: int | None) -> int | None:
        """Return the expected output tokens of a line; None before one was answered. O(1).

        ``limit`` is the line's own limit of output tokens; None without one. The mean of
        all lines weighs as much as one line with a similar limit.
        """
        if not self._all.lines:
            return None
        mean = self._all.tokens / self._all.lines
        alike = self._by_limit.get(_size(limit), _Sum())
        tokens = round((alike.tokens + mean) / (alike.lines + 1))
        return tokens if limit is None else min(tokens, max(0, limit))


def _size(limit: int | None) -> int:
    return 0 if limit is None else max(0, limit).bit_length()
