"""Fits a model by rescaling its coefficients, for predictions that are not linear in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

import numpy as np

from sglang_coserve.core.latency_model.protocol import LatencyModel
from sglang_coserve.core.latency_model.samples import Floats, SampleTable

__all__ = ["fit_rescaled", "rescaled"]

M = TypeVar("M", bound=LatencyModel)

# Weight of the start values, in samples: enough to keep a coefficient that no
# sample determines, too little to matter for one that a few samples determine.
_PRIOR_WEIGHT: Final = 1e-3
# Rows per block, so that the intermediate columns stay in the CPU cache.
_BLOCK: Final = 4096
_MAX_ROUNDS: Final = 30
_MAX_HALVINGS: Final = 5
# Convergence threshold, in the logarithm of a coefficient: 0.01%.
_TOLERANCE: Final = 1e-4


def rescaled(model: M, log_factors: Floats) -> M:
    """Return the model with each coefficient multiplied by exp(log_factor)."""
    factors = np.exp(log_factors).tolist()
    return model.with_coefficients(
        {
            name: value * factor
            for (name, value), factor in zip(model.coefficients.items(), factors, strict=True)
        }
    )


def fit_rescaled(start: M, table: SampleTable) -> M:
    """Return ``start`` rescaled to the least relative squared error on the table.

    Uses Gauss–Newton on the logarithms of the coefficients, which keeps them
    positive and independent of units; updates that do not improve the loss
    are halved. A coefficient of zero stays zero.
    """
    blocks = [
        table.take(np.arange(first, min(first + _BLOCK, len(table))))
        for first in range(0, len(table), _BLOCK)
    ]
    model = start
    log_factors: Floats = np.zeros(len(start.coefficients))
    gram, gradient, loss = _expand(model, blocks, log_factors)
    for _ in range(_MAX_ROUNDS):
        step = np.linalg.solve(gram, gradient)
        if np.abs(step).max() < _TOLERANCE:
            break
        for _ in range(_MAX_HALVINGS):
            candidate = rescaled(start, log_factors + step)
            expansion = _expand(candidate, blocks, log_factors + step)
            if expansion[2] < loss:
                break
            step /= 2
        else:
            break
        model, log_factors = candidate, log_factors + step
        gram, gradient, loss = expansion
    return model


def _expand(
    model: LatencyModel, blocks: Iterable[SampleTable], log_factors: Floats
) -> tuple[Floats, Floats, float]:
    """Return the Gauss–Newton matrix, the negative gradient and the loss."""
    gram: Floats = _PRIOR_WEIGHT * np.eye(len(log_factors))
    gradient: Floats = -_PRIOR_WEIGHT * log_factors
    loss = _PRIOR_WEIGHT * float(log_factors @ log_factors)
    for block in blocks:
        shares = model.contributions(block) / block.seconds[:, np.newaxis]
        error = 1.0 - shares.sum(axis=1)
        gram += shares.T @ shares
        gradient += shares.T @ error
        loss += float(error @ error)
    return gram, gradient, loss
