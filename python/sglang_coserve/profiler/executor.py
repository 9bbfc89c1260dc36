"""Shapes of batches, and the interface of executors that run them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from sglang_coserve.core.step_stats import StepStats


class ShapeKind(Enum):
    """The kinds of requests in a batch."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class StepShape:
    """The lengths of the requests of a batch; the tokens themselves do not matter."""

    prefills: tuple[tuple[int, int], ...] = ()
    """(P, C) of each prefill request: P ≥ 1 tokens to compute, C ≥ 0 cached before them."""

    decodes: tuple[int, ...] = ()
    """C ≥ 1 of each decode request: tokens cached before the one it computes."""

    def __post_init__(self) -> None:
        assert self.prefills or self.decodes, "a batch has at least one request"
        for tokens, context in self.prefills:
            assert tokens >= 1 and context >= 0, f"no prefill: {tokens} tokens after {context}"
        assert all(context >= 1 for context in self.decodes), "a decode without a prompt"

    @property
    def kind(self) -> ShapeKind:
        """The kinds of its requests."""
        if not self.decodes:
            return ShapeKind.PREFILL
        return ShapeKind.MIXED if self.prefills else ShapeKind.DECODE

    @property
    def stats(self) -> StepStats:
        """The sums used by latency models. O(requests)."""
        return StepStats.of(self.prefills, self.decodes)

    def request_tokens(self) -> Iterator[int]:
        """Yield P + C of each request: the KV that it holds after the batch has run."""
        yield from (tokens + context for tokens, context in self.prefills)
        yield from (context + 1 for context in self.decodes)


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """The limits of the batches that an executor can run."""

    max_batch_tokens: int
    """ΣP of a batch with prefill requests: SGLang's chunked prefill size."""

    max_request_tokens: int
    """P + C of one request."""

    max_requests: int
    """Most requests of one batch."""

    kv_capacity_tokens: int
    """Σ(P + C), each request rounded up to whole pages."""

    page_tokens: int = 1

    def allow(self, shape: StepShape) -> bool:
        """Return whether a batch of this shape can run. O(requests)."""
        lengths = list(shape.request_tokens())
        pages = sum(-(-tokens // self.page_tokens) for tokens in lengths)
        batch_tokens = sum(tokens for tokens, _ in shape.prefills) + len(shape.decodes)
        return (
            len(lengths) <= self.max_requests
            and max(lengths) <= self.max_request_tokens
            and pages * self.page_tokens <= self.kv_capacity_tokens
            and (not shape.prefills or batch_tokens <= self.max_batch_tokens)
        )


class ShapeExecutor(Protocol):
    """Runs batches one at a time, without lasting effects."""

    @property
    def limits(self) -> ExecutorLimits:
        """The limits of the shapes that ``run`` accepts."""
        ...

    def run(self, shape: StepShape) -> float:
        """Run one batch within ``limits``; return the seconds of its step.

        The time excludes building and releasing the batch.

        Raises:
            ServerError: the engine failed on this batch.
        """
        ...
