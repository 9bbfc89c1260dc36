"""The online load: who arrives when, with how many tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from sglang_coserve.errors import WorkloadError
from sglang_coserve.workload import (
    TraceRequest,
    fit_to_context,
    gamma_arrivals,
    read_trace,
    synthesize,
)

__all__ = ["OnlineSpec", "burst", "online_requests"]


@dataclass(frozen=True, slots=True)
class OnlineSpec:
    """Arrivals from a trace, else a Gamma process with uniform lengths."""

    trace: Path | None = None
    cv: float = 1.0
    """Coefficient of variation of the gaps; 1 is Poisson. Not used with a trace."""

    prompt_tokens: int = 256
    output_tokens: int = 64
    range_ratio: float = 0.5
    """Lengths are uniform from this fraction of the above up to the above."""


def online_requests(
    spec: OnlineSpec, rate_per_s: float, seconds: float, seed: int, max_context_tokens: int
) -> list[TraceRequest]:
    """Return ``rate_per_s · seconds`` requests whose mean gap is exactly 1/rate, the first at 0.

    The shape over time, a trace's or the seed's, is stretched to that rate; the
    same arguments give the same requests.

    Raises:
        WorkloadError: the trace is too short.
    """
    count = max(2, round(rate_per_s * seconds))
    requests, _ = fit_to_context(islice(_endless(spec, seed), count), max_context_tokens)
    if len(requests) < count:
        raise WorkloadError(
            f"{spec.trace}: {len(requests)} usable requests where {count} are needed: "
            "give a longer trace, a shorter window or a lower load"
        )
    return _stretch(requests, (count - 1) / rate_per_s)


def burst(spec: OnlineSpec, count: int, seed: int, max_context_tokens: int) -> list[TraceRequest]:
    """Return up to ``count`` requests of the same lengths that all arrive at once."""
    requests, _ = fit_to_context(islice(_endless(spec, seed), count), max_context_tokens)
    return [replace(request, arrival_s=0.0) for request in requests]


def _endless(spec: OnlineSpec, seed: int) -> Iterable[TraceRequest]:
    if spec.trace is not None:
        # A request without prompt or output failed when it was recorded.
        return (r for r in read_trace(spec.trace) if r.prompt_tokens and r.output_tokens)
    return synthesize(gamma_arrivals(1.0, spec.cv, seed), _uniform_lengths(spec, seed))


def _uniform_lengths(spec: OnlineSpec, seed: int) -> Iterator[tuple[int, int]]:
    rng = random.Random(seed + 1)
    while True:
        yield _draw(rng, spec.prompt_tokens, spec), _draw(rng, spec.output_tokens, spec)


def _draw(rng: random.Random, longest: int, spec: OnlineSpec) -> int:
    return rng.randint(max(1, round(longest * spec.range_ratio)), longest)


def _stretch(requests: list[TraceRequest], seconds: float) -> list[TraceRequest]:
    """Move the first arrival to 0 and the last to ``seconds``, the others in proportion."""
    first_s, last_s = requests[0].arrival_s, requests[-1].arrival_s
    if last_s <= first_s:
        raise WorkloadError("all requests of the trace arrive at the same time")
    factor = seconds / (last_s - first_s)
    return [replace(r, arrival_s=(r.arrival_s - first_s) * factor) for r in requests]
