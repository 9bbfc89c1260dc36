"""What bounds a batch, read off any latency model: fixed costs, memory or compute (OOCO §3.3.3)."""

from __future__ import annotations

from typing import Final

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.latency_model import LatencyModel

__all__ = ["fixed_s", "is_compute_saturated", "saturated_batch_size"]

_MAX_BATCH_SIZE: Final = 4096
_SATURATED_GROWTH: Final = 1.5


def fixed_s(model: LatencyModel) -> float:
    """Return what an iteration takes however small it is: the time of a single decode."""
    return model.predict(BatchStats(decode_requests=1))


def is_compute_saturated(model: LatencyModel, batch_size: int) -> bool:
    """Tell whether more rows no longer share the fixed cost of an iteration.

    True when twice as many rows, apart from the KV they read, take half as long
    again: their own work then costs as much as what all share (the weights'
    way from memory, launches). Below, an iteration is memory-bound.
    """
    if batch_size == 0:
        return False
    once_s = model.predict(BatchStats(decode_requests=batch_size))
    twice_s = model.predict(BatchStats(decode_requests=2 * batch_size))
    return twice_s >= _SATURATED_GROWTH * once_s


def saturated_batch_size(model: LatencyModel) -> int:
    """Return OOCO's bs_sat: the smallest power of two that saturates compute, at most 4096."""
    size = 1
    while size < _MAX_BATCH_SIZE and not is_compute_saturated(model, size):
        size *= 2
    return size
