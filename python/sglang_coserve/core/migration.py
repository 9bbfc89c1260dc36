"""Chooses the offline requests to pull from another instance (OOCO §3.4.3, Algorithm 1)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Mapping
from typing import TypeVar

from sglang_coserve.core.bottleneck import saturated_batch_size
from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.step_stats import StepStats

_Request = TypeVar("_Request", bound=Hashable)


def preferred_length(
    model: LatencyModel,
    batch: StepStats,
    slo_s: float,
    free_kv_tokens: int,
    *,
    includes_all: bool,
) -> tuple[int, int] | None:
    """Return which length of context the requests worth pulling have, and the greatest that fits.

    In tokens; ``None`` if nothing should be pulled, 1 to prefer the shortest.

    ``batch`` are the decodes of the last step, of all requests of the instance if
    ``includes_all``; ``slo_s`` bounds a step, and ``free_kv_tokens`` is the paper's 1 − U_mem.

    Requests are pulled only if the instance runs all its requests and has time left (line 2).
    With compute saturated more requests gain nothing, so prefer the greatest length that fits time
    and memory (lines 4–5). Below saturation: if as many equal requests as saturation still
    needs fit together, prefer the greatest length at which they do (lines 7–8); else the
    shortest, for the most requests (line 10). O(log free_kv_tokens) predictions.

    The paper's line 8 ignores memory; here a length that does not fit is never preferred.
    """
    if not includes_all or model.predict(batch) >= slo_s:
        return None
    longest = _longest(model, batch, 1, slo_s, free_kv_tokens)
    if longest == 0:
        return None
    missing = saturated_batch_size(model) - batch.decode_requests
    if missing <= 0:
        return longest, longest
    # The paper's "group of requests": as many equal ones as saturation still needs.
    group = _longest(model, batch, missing, slo_s, free_kv_tokens // missing)
    return group or 1, longest


def step_bound_s(model: LatencyModel, online: StepStats, tpot_s: float | None) -> float:
    """Return the longest time of a decode step, in seconds: the target, but at least what the
    ``online`` decodes take. Infinite without a target."""
    return math.inf if tpot_s is None else max(tpot_s, model.predict(online))


def requests_to_pull(
    lengths: Mapping[_Request, int],
    preferred_tokens: int,
    most_tokens: int,
    *,
    most: int,
    coming_tokens: int = 0,
) -> list[_Request]:
    """Return which requests to pull, closest to the preferred length first (line 14).

    ``lengths`` are the tokens of context of those that may be pulled. ``coming_tokens`` are of
    requests on their way, which the preference does not know of.

    Together they are no longer than what fits as one request. That is exact for memory; for time
    it leaves out what each request costs beside its context, which the next
    preference, made once they run, corrects. O(requests log requests).
    """
    left_tokens = most_tokens - coming_tokens
    chosen: list[_Request] = []
    for request, length in sorted(
        lengths.items(), key=lambda item: (abs(item[1] - preferred_tokens), item[1])
    ):
        if len(chosen) >= most:
            break
        if length <= left_tokens:
            left_tokens -= length
            chosen.append(request)
    return chosen


def _longest(
    model: LatencyModel, batch: StepStats, count: int, slo_s: float, limit_tokens: int
) -> int:
    """Return the greatest length at which ``count`` more decodes stay within the bound, or 0."""

    def joined_s(length: int) -> float:
        return model.predict(batch.with_decodes(count, count * (length - 1)))

    return bisect_right(range(1, limit_tokens + 1), slo_s, key=joined_s)
