"""How long a step needs to be: the size from which more tokens hardly raise the throughput."""

from __future__ import annotations

from typing import Final

from sglang_coserve.core.planning.step_builder import StepBuilder

__all__ = ["efficient_tokens"]

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
    if batch.free_tokens <= 0:
        return 0
    sizes = [batch.free_tokens]
    while sizes[-1] > _FEWEST_TOKENS:
        sizes.append(int(sizes[-1] / _RATIO))
    decodes = batch.work.stats.compute_tokens
    rates = [(decodes + size) / batch.work.predict_with_prefill(size, 0) for size in sizes]
    enough = _ENOUGH * max(rates)
    return min(size for size, rate in zip(sizes, rates, strict=True) if rate >= enough)
