"""Finds the longest prefill chunk within a latency budget."""

from __future__ import annotations

import math
from itertools import count
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

    Correct for any monotone ``predict``, in O(log limit) predictions: at most every third halves
    what is left. With ``guess``, an approximate solution, the search starts there, and takes two
    predictions if the guess is exact. From there it follows the line through the last two, as
    models are linear in pieces.
    """
    assert limit_tokens >= 0, f"negative limit: {limit_tokens}"
    low, high = 0, limit_tokens + 1  # low fits, high does not
    last, last_s = 0, budget_s
    probe = high // 2 if guess is None else round(min(guess, limit_tokens))
    for number in count(1):
        if high - low <= 1:
            break
        seconds = model.predict(batch.with_prefill(probe, context_tokens))
        if seconds <= budget_s:
            low, ahead = probe, 1.0
        else:
            high, ahead = probe, -1.0
        if number > 1 and seconds != last_s:
            ahead = (budget_s - seconds) * (probe - last) / (seconds - last_s)
        last, last_s = probe, seconds
        if number % 3:
            probe = math.floor(min(max(probe + ahead, low + 1), high - 1))
        else:
            probe = (low + high) // 2
    return low
