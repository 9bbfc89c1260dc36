"""Synthetic workloads: endless arrivals, and prompts with lengths and prefixes of a trace.

Arrivals have a rate, a burstiness and a seed. They draw from ``random.Random``, whose stream for a
seed does not depend on the NumPy version, so a seed names the same workload everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from itertools import accumulate, count

import numpy as np
from numpy.typing import NDArray

from sglang_coserve.errors import ConfigError
from sglang_coserve.workload.trace import BLOCK_TOKENS, TraceRequest


def gamma_arrivals(rate_per_s: float, cv: float, seed: int) -> Iterator[float]:
    """Return endless arrival times in seconds whose gaps are independent Gamma draws.

    The gaps have mean 1/rate and coefficient of variation ``cv``: shape 1/cv²
    and scale cv²/rate. 0 gives evenly spaced arrivals, 1 a Poisson process;
    ConServe §6.2 uses 0.5.

    Raises:
        ConfigError: The rate is not positive or ``cv`` is negative.
    """
    if not 0 < rate_per_s < math.inf:
        raise ConfigError(f"arrival rate {rate_per_s}/s: it must be a positive number")
    if not 0 <= cv < math.inf:
        raise ConfigError(f"coefficient of variation {cv}: it must be 0 or a positive number")
    if cv == 0:
        return (number / rate_per_s for number in count(1))
    rng = random.Random(seed)
    shape, scale_s = 1 / cv**2, cv**2 / rate_per_s
    return accumulate(iter(lambda: rng.gammavariate(shape, scale_s), None))


def synthesize(
    arrivals_s: Iterable[float], lengths: Iterable[tuple[int, int]]
) -> Iterator[TraceRequest]:
    """Pair arrival times with (prompt tokens, output tokens) until either ends.

    ``synthesize(gamma_arrivals(2.0, 0.5, seed=1), itertools.repeat((4096, 256)))``
    is the synthetic online load of ConServe §6.2.
    """
    pairs = zip(arrivals_s, lengths, strict=False)
    return (
        TraceRequest(index, arrival_s, prompt_tokens, output_tokens)
        for index, (arrival_s, (prompt_tokens, output_tokens)) in enumerate(pairs)
    )


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
