"""Endless arrivals with a rate, a burstiness and a seed.

They draw from ``random.Random``, whose stream for a seed does not depend on the NumPy version, so a
seed names the same workload everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from itertools import accumulate, count

from sglang_coserve.errors import ConfigError
from sglang_coserve.workload.trace import TraceRequest


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
