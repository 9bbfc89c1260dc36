"""Tells from a latency model what bounds a batch: fixed costs, memory or compute (OOCO §3.3.3)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.step_stats import StepStats

_MAX_BATCH_SIZE: Final = 4096
_SATURATED_GROWTH: Final = 1.5

_NEARLY_ALL: Final = 0.9
"""Share of the highest throughput of offline requests that is enough for the KV that they hold."""


def fixed_s(model: LatencyModel) -> float:
    """Return the fixed cost of a step in seconds: the predicted time of a single decode."""
    return model.predict(StepStats(decode_requests=1))


def least_offline_s(model: LatencyModel) -> float:
    """Return the time of the shortest step without online work that is worth its fixed cost.

    A step of length L with fixed cost F spends the share 1 - F/L of its time on its requests, and
    an arriving request waits for it in proportion to L. Work per wait, (1 - F/L) / L, is largest
    at L = 2F: a shorter step delays arrivals less, but its work even less.
    """
    return 2 * max(fixed_s(model), model.predict(StepStats.of([(1, 0)])))


def enough_requests(
    model: LatencyModel,
    beside: StepStats,
    prompt_tokens: float,
    output_tokens: float,
    budget_s: float,
    most: int,
) -> int:
    """Return how many equal requests give nearly all the throughput of steps of ``budget_s``.

    In a steady state each request that ends is followed by a new one. So a step with N decodes also
    computes N · prompt ÷ output prompt tokens. More requests than fit such a step only hold KV:
    their decodes take the time that the prompts behind them need. The last requests that fit add
    little, once attention takes most of a step. O(log most) predictions.

    Args:
        model: Predicts the time of steps.
        beside: Sums over the work that such a step has already.
        prompt_tokens: Mean tokens of a prompt that are to be computed.
        output_tokens: Mean tokens of an output.
        budget_s: Longest time of a step, in seconds.
        most: Most requests to return.
    """
    context_tokens = round(prompt_tokens + output_tokens / 2)
    output_tokens = max(output_tokens, 1.0)

    def step_s(count: int) -> float:
        batch = beside.with_decodes(count, count * context_tokens)
        tokens = round(count * prompt_tokens / output_tokens)
        return model.predict(batch.with_prefill(tokens, 0) if tokens else batch)

    fitting = bisect_right(range(1, most + 1), budget_s, key=step_s)
    enough = _NEARLY_ALL * fitting / step_s(fitting) if fitting else 0.0
    return bisect_left(range(1, fitting + 1), enough, key=lambda count: count / step_s(count)) + 1


def is_compute_saturated(model: LatencyModel, batch_size: int) -> bool:
    """Return whether a batch is compute-bound: more requests no longer amortize fixed costs.

    True when twice as many requests (not counting the KV they read) take at least 1.5 times as
    long: the work of the requests then costs as much as what all of them share (reading the
    weights from memory, kernel launches). Below that the step is memory-bound.
    """
    if batch_size == 0:
        return False
    once_s = model.predict(StepStats(decode_requests=batch_size))
    twice_s = model.predict(StepStats(decode_requests=2 * batch_size))
    return twice_s >= _SATURATED_GROWTH * once_s


def saturated_batch_size(model: LatencyModel) -> int:
    """Return OOCO's bs_sat: the smallest power of two that saturates compute, at most 4096."""
    size = 1
    while size < _MAX_BATCH_SIZE and not is_compute_saturated(model, size):
        size *= 2
    return size
