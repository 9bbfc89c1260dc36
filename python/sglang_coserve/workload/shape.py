"""Fits a trace to the machine under test, a slice, a rate, a context limit, and makes its prompts.

Functions of requests take them in arrival order and keep that order; all but ``fit_to_context`` are
streaming.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sglang_coserve.errors import ConfigError
from sglang_coserve.workload.trace import BLOCK_TOKENS, TraceRequest

RESERVED_TOKENS: Final = 8
"""Positions of a model's context that SGLang keeps for itself, and a few to spare."""


def until(requests: Iterable[TraceRequest], end_s: float) -> Iterator[TraceRequest]:
    """Yield the requests that arrive before ``end_s``. Reads no further than the first one after.

    Raises:
        ConfigError: That is no time.
    """
    if not end_s > 0:
        raise ConfigError(f"requests until {end_s} s: it must be a positive number")
    return takewhile(lambda request: request.arrival_s < end_s, requests)


def scale_rate(requests: Iterable[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    """Compress time: the same requests, ``factor`` times as many per second.

    Bursts get shorter with everything else.

    Raises:
        ConfigError: The factor is not a positive number.
    """
    if not 0 < factor < math.inf:
        raise ConfigError(f"rate factor {factor}: it must be a positive number")
    return (replace(request, arrival_s=request.arrival_s / factor) for request in requests)


def fit_to_context(
    requests: Iterable[TraceRequest], max_context_tokens: int
) -> tuple[list[TraceRequest], str]:
    """Cut requests to a model's context and drop those that failed when recorded.

    First outputs are cut to leave room for one prompt token; then prompts are cut at
    their end to the room that is left, so that shared prefixes stay shared.

    Returns:
        The requests, and in words how many they are, have failed and were cut.

    Raises:
        ConfigError: The limit leaves no room for one prompt and one output token.
    """
    if max_context_tokens < 2:
        raise ConfigError(f"context limit {max_context_tokens}: it must be at least 2 tokens")
    kept: list[TraceRequest] = []
    failed = cut = 0
    for request in requests:
        if request.prompt_tokens == 0 or request.output_tokens == 0:
            failed += 1
            continue
        cut += request.prompt_tokens + request.output_tokens > max_context_tokens
        output_tokens = min(request.output_tokens, max_context_tokens - 1)
        prompt_tokens = min(request.prompt_tokens, max_context_tokens - output_tokens)
        kept.append(
            replace(
                request,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                hash_ids=request.hash_ids[: -(-prompt_tokens // BLOCK_TOKENS)],
            )
        )
    done = f"{failed} failed ones left out, {cut} cut to {max_context_tokens} tokens"
    return kept, f"{len(kept)} requests, {done}"


def prompt_token_ids(
    request: TraceRequest, *, vocab_size: int, seed: int, first_token_id: int = 0
) -> NDArray[np.int64]:
    """Return ``request.prompt_tokens`` token ids from [first_token_id, vocab_size).

    Equal hash ids give equal blocks, so prompts share exactly the prefixes the
    trace says. All other tokens depend on the request's ``index`` and are
    shared with no one. A pure function of its arguments, the same on every
    platform and NumPy version. O(prompt tokens), vectorized.
    """
    assert 0 <= first_token_id < vocab_size, f"no token ids in [{first_token_id}, {vocab_size})"
    bits = np.arange(request.prompt_tokens, dtype=np.uint64)
    blocks = request.hash_ids[: -(-request.prompt_tokens // BLOCK_TOKENS)]
    shared = min(len(blocks) * BLOCK_TOKENS, request.prompt_tokens)
    bits[:shared] %= BLOCK_TOKENS
    bits *= _GOLDEN_RATIO
    # Even streams are blocks, odd ones requests: the two can never meet.
    stream = np.array([*(2 * block for block in blocks), 2 * request.index + 1], dtype=np.uint64)
    key = _mix(np.array([seed % 2**64], dtype=np.uint64))
    starts = _mix(key + stream * _GOLDEN_RATIO)
    bits[:shared] += np.repeat(starts[:-1], BLOCK_TOKENS)[:shared]
    bits[shared:] += starts[-1]
    bits = _mix(bits)
    span = vocab_size - first_token_id
    if span & (span - 1):
        bits %= np.uint64(span)
    else:
        bits &= np.uint64(span - 1)  # The same for a power of two, and several times as fast.
    token_ids = bits.view(np.int64)
    token_ids += first_token_id
    return token_ids


_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit words in place, and return them: the output function of SplitMix64 (Steele
    et al., OOPSLA 2014)."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
