"""Finds the longest prefill chunk within a latency budget."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sglang_coserve.core.step_stats import StepStats

if TYPE_CHECKING:
    from sglang_coserve.core.latency_model.protocol import LatencyModel

__all__ = ["longest_prefill", "solve_chunk"]


def solve_chunk(slack_s: float, per_token_s: float, per_token_squared_s: float) -> float:
    """Return the smallest n ≥ 0 with per_token_squared_s·n² + per_token_s·n = slack_s.

    0 without slack, infinity if both coefficients are 0, or if no n is enough.
    """
    if slack_s <= 0:
        return 0.0
    discriminant = per_token_s**2 + 4 * per_token_squared_s * slack_s
    if discriminant < 0:
        return math.inf
    # This form of the root avoids cancellation, so it is also exact for tiny quadratic terms.
    root = per_token_s + math.sqrt(discriminant)
    return 2 * slack_s / root if root > 0 else math.inf


def longest_prefill(
    model: LatencyModel,
    batch: StepStats,
    context_tokens: int,
    limit_tokens: int,
    budget_s: float,
    guess: float | None = None,
) -> int:
    """Return the largest n ≤ limit for which ``model.predict`` stays within the budget.

    Correct for any monotone ``predict``. With ``guess``, an approximate
    solution, the search starts there and takes only two predictions if the guess is exact;
    without, it bisects in O(log limit) predictions.
    """
    assert limit_tokens >= 0, f"negative limit: {limit_tokens}"
    low, high = 0, limit_tokens + 1  # low fits, high does not
    step = 1 if guess is not None else high
    probe = high // 2 if guess is None else round(min(guess, limit_tokens))
    while high - low > 1:
        if model.predict(batch.with_prefill(probe, context_tokens)) <= budget_s:
            low, probe = probe, probe + step
        else:
            high, probe = probe, probe - step
        step *= 2
        if not low < probe < high:
            probe = (low + high) // 2
    return low
