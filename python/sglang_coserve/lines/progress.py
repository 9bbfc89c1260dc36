"""How many lines of a job are finished, and what they took."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Progress", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, summed over finished lines."""

    input_tokens: int = 0
    cached_tokens: int = 0
    """Of ``input_tokens``, those taken from the cache."""

    output_tokens: int = 0
    reasoning_tokens: int = 0
    """Of ``output_tokens``, those that are no part of the answer."""

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
    """What the output and error files hold, up to a moment at which both were on the disk."""

    completed: int = 0
    failed: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    usage: Usage = Usage()

    estimated_tokens: int = 0
    """What the finished lines were expected to take; against ``usage`` it calibrates the rest."""

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
        """Finished lines."""
        return self.completed + self.failed
