"""Prompt tokens that online requests find in the cache, with offline work and alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheComparison:
    """Sums over online requests since the start.

    A request counts once, when it has its first token both in the engine and in the no-interference
    baseline, so that all sums are of the same requests. Requests with unknown token ids do not
    count: the baseline finds no prefix for these.
    """

    prompt_tokens: int = 0
    found_tokens: int = 0
    """Prompt tokens that the engine had in its cache and did not compute. A prompt that was
    computed twice, after its request was retracted, found the less."""

    found_alone_tokens: int = 0
    """Prompt tokens that were in the cache of the baseline."""

    def add(self, prompt_tokens: int, computed_tokens: int, found_alone_tokens: int) -> None:
        """Count a request; the engine computed ``computed_tokens`` of its prompt tokens."""
        self.prompt_tokens += prompt_tokens
        self.found_tokens += max(prompt_tokens - computed_tokens, 0)
        self.found_alone_tokens += found_alone_tokens
