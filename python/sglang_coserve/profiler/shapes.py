"""Batches by the lengths of their requests: who runs them, and which ones are measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, zip_longest
from typing import Final, Protocol

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


_MAX_DECODES: Final = 256
_MAX_PREFILLS: Final = 16
_MAX_CANDIDATES: Final = 1200
_MIN_CHUNK_TOKENS: Final = 16
_MIN_CONTEXT_TOKENS: Final = 16
# Value of the other quantities while a ladder varies one.
_BASE_CHUNK_TOKENS: Final = 64
_BASE_CONTEXT_TOKENS: Final = 256
_BASE_DECODES: Final = 4
_KINDS: Final = (ShapeKind.PREFILL, ShapeKind.DECODE, ShapeKind.MIXED)


def plan_grid(limits: ExecutorLimits, num_shapes: int = 400) -> tuple[StepShape, ...]:
    """Return up to ``num_shapes`` different shapes within ``limits``, the most informative first.

    First come ladders: one quantity doubles (chunk, decodes, context, prompts)
    while the others stay small, all ladders in turn. They determine every
    coefficient of every model early, and reach the limits in increments that never cost
    much more than what was measured before. Then a Halton sequence
    fills the space in between, evenly in the logarithms wherever it is stopped:
    prefill, decode and mixed batches in turn, with uneven contexts within a batch.
    """
    candidates = chain(_ladders(limits), _fill(limits))
    shapes: dict[StepShape, None] = {}
    for shape in candidates:
        if len(shapes) == num_shapes:
            break
        if limits.allow(shape):
            shapes.setdefault(shape)
    return tuple(shapes)


def _ladders(limits: ExecutorLimits) -> Iterator[StepShape]:
    chunk, base_context = _BASE_CHUNK_TOKENS, _BASE_CONTEXT_TOKENS
    max_chunk = min(limits.max_batch_tokens, limits.max_request_tokens)
    chunks = _doubling(_MIN_CHUNK_TOKENS, max_chunk)
    decodes = _doubling(1, min(_MAX_DECODES, limits.max_requests))
    contexts = _doubling(_MIN_CONTEXT_TOKENS, limits.max_request_tokens - chunk)
    ladders = (
        [StepShape(prefills=((tokens, 0),)) for tokens in chunks],
        [StepShape(decodes=(base_context,) * requests) for requests in decodes],
        [StepShape(prefills=((chunk, context),)) for context in contexts],
        [StepShape(decodes=(context,) * _BASE_DECODES) for context in contexts],
        [StepShape(((tokens, 0),), (base_context,) * _BASE_DECODES) for tokens in chunks],
        [StepShape(prefills=((chunk, 0),) * requests) for requests in _doubling(2, _MAX_PREFILLS)],
        [StepShape(((chunk, base_context),), (base_context,) * requests) for requests in decodes],
    )
    for step in zip_longest(*ladders):
        yield from (shape for shape in step if shape is not None)


def _fill(limits: ExecutorLimits) -> Iterator[StepShape]:
    max_decodes = min(_MAX_DECODES, limits.max_requests)
    max_context = limits.max_request_tokens
    for index in range(1, _MAX_CANDIDATES):
        kind = _KINDS[index % len(_KINDS)]
        decodes: tuple[int, ...] = ()
        prefills: tuple[tuple[int, int], ...] = ()
        if kind is not ShapeKind.PREFILL:
            requests = _between(1, max_decodes, _halton(index, 2))
            fitting = max(1, limits.kv_capacity_tokens // (2 * requests))
            context = _between(_MIN_CONTEXT_TOKENS, min(max_context, fitting), _halton(index, 3))
            decodes = tuple(min(max_context - 1, c) for c in _spread(context, requests))
        if kind is not ShapeKind.DECODE:
            tokens = _between(
                _MIN_CHUNK_TOKENS, limits.max_batch_tokens - len(decodes), _halton(index, 5)
            )
            requests = _between(1, min(_MAX_PREFILLS, tokens), _halton(index, 7))
            chunk = tokens // requests
            context = _between(1, max_context - chunk, _halton(index, 11))
            prefills = tuple((chunk, c) for c in _spread(context, requests))
        yield StepShape(prefills, decodes)


def _doubling(first: int, last: int) -> list[int]:
    """Return first, 2·first, … and ``last`` itself, ascending."""
    if last <= first:
        return [max(1, last)]
    values = []
    while first < last:
        values.append(first)
        first *= 2
    return [*values, last]


def _between(low: int, high: int, share: float) -> int:
    """Return the integer at this share of the way from low to high, on a logarithmic scale."""
    low = max(1, min(low, high))
    high = max(low, high)
    return round(low * math.exp(share * math.log(high / low)))


def _spread(mean: int, count: int) -> list[int]:
    """Return ``count`` values from half to one and a half of the mean, ascending."""
    if count == 1:
        return [mean]
    return [max(1, round(mean * (0.5 + place / (count - 1)))) for place in range(count)]


def _halton(index: int, base: int) -> float:
    """Return the radical inverse of ``index``, in (0, 1) for a positive index."""
    value, digit_value = 0.0, 1.0
    while index:
        digit_value /= base
        index, digit = divmod(index, base)
        value += digit * digit_value
    return value
