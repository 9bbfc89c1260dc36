"""Counts of a job's finished lines and of the tokens that they took."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Progress", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, summed over finished lines."""

    input_tokens: int = 0
    cached_tokens: int = 0
    """Those of ``input_tokens`` that were cached."""

    output_tokens: int = 0
    reasoning_tokens: int = 0
    """Those of ``output_tokens`` that are not part of the answer."""

    @property
    def total_tokens(self) -> int:
        """Input and output together."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """The contents of the output and error files, as far as both are on disk."""

    completed: int = 0
    failed: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    usage: Usage = Usage()

    estimated_tokens: int = 0
    """Estimated tokens of the finished lines; compared with ``usage`` it calibrates the estimate
    of the others."""

    def __add__(self, other: Progress) -> Progress:
        return Progress(
            self.completed + other.completed,
            self.failed + other.failed,
            self.output_bytes + other.output_bytes,
            self.error_bytes + other.error_bytes,
            self.usage + other.usage,
            self.estimated_tokens + other.estimated_tokens,
        )

    @property
    def lines(self) -> int:
        """Number of finished lines."""
        return self.completed + self.failed
