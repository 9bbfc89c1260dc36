"""Prompts with the lengths and the common prefixes of a trace."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_coserve.workload.trace import BLOCK_TOKENS, TraceRequest


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
