"""How long a step needs to be: the size from which more tokens hardly raise the throughput."""

from __future__ import annotations

from typing import Final

from sglang_coserve.core.planning.step_builder import StepBuilder

__all__ = ["efficient_s", "efficient_tokens"]

_ENOUGH: Final = 0.95
"""Share of the highest throughput that is enough. A longer step gains little, and stretches the
gaps of everyone in it: slower decodes leave more requests in flight. Simulated on an H100
(``bound.py``), steps up to the slack had a third of the offline tokens."""

_RATIO: Final = 2**0.5
_FEWEST_TOKENS: Final = 64
"""Sizes that are tried: from all tokens that fit down to this many, each 1/sqrt(2) of the last."""


def efficient_tokens(batch: StepBuilder) -> int:
    """Return the fewest prefill tokens that give a step 95% of its highest throughput.

    Beside the work that the batch has already. Computed for a single prompt without context. O(log
    tokens) predictions.
    """
    return _efficient(batch)[0]


def efficient_s(batch: StepBuilder) -> float:
    """Return the predicted time of the batch with ``efficient_tokens``."""
    return _efficient(batch)[1]


def _efficient(batch: StepBuilder) -> tuple[int, float]:
    most = batch.free_tokens
    if most <= 0:
        return 0, batch.work.predicted_s
    sizes = [most]
    while sizes[-1] > _FEWEST_TOKENS:
        sizes.append(int(sizes[-1] / _RATIO))
    decodes = batch.work.stats.compute_tokens
    times_s = [batch.work.predict_with_prefill(size, 0) for size in sizes]
    rates = [(decodes + size) / time_s for size, time_s in zip(sizes, times_s, strict=True)]
    enough = _ENOUGH * max(rates)
    return min(
        (size, time_s)
        for size, time_s, rate in zip(sizes, times_s, rates, strict=True)
        if rate >= enough
    )
