"""Shaping a trace to the machine under test: a slice, a rate, a context limit.

Every function takes requests in arrival order and keeps that order; all but
``fit_to_context`` are streaming.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Final

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
