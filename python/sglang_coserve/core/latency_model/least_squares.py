"""Non-negative least squares on the relative error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from sglang_coserve.core.latency_model.samples import Floats
from sglang_coserve.errors import InputFileError

__all__ = ["fit_relative", "solve_nonnegative"]

# Below this share of the largest eigenvalue a direction is rounding, not measurement.
_RANK_TOLERANCE: Final = 1e-11


def fit_relative(terms: Floats, seconds: Floats, names: Sequence[str]) -> dict[str, float]:
    """Return the coefficients c ≥ 0 that minimise Σ((terms·c − seconds) / seconds)².

    ``terms`` has shape (n, k), ``seconds`` (n,); ``names`` are the k
    coefficients. O(n·k²).

    Raises:
        InputFileError: the samples leave some coefficient undetermined.
    """
    num_samples, num_terms = terms.shape
    if num_samples < num_terms:
        raise InputFileError(
            f"samples: {num_samples} left to fit {num_terms} coefficients "
            f"({', '.join(names)}): measure more batches"
        )
    relative = terms / seconds[:, np.newaxis]
    scale = np.sqrt(np.einsum("ij,ij->j", relative, relative))
    unseen = [name for name, norm in zip(names, scale, strict=True) if norm == 0]
    if unseen:
        raise InputFileError(
            f"samples: no batch does the work that {', '.join(unseen)} prices: "
            "measure batches that do"
        )
    # Columns differ by ten orders of magnitude (a constant beside ΣP·(P + C)):
    # with unit norm each, the normal equations lose no digits to that.
    relative /= scale
    gram = relative.T @ relative
    _reject_ambiguous(gram, names)
    solution = solve_nonnegative(gram, relative.sum(axis=0)) / scale
    return dict(zip(names, solution.tolist(), strict=True))


def solve_nonnegative(gram: Floats, moment: Floats) -> Floats:
    """Return x ≥ 0 that minimises ½·xᵀ·gram·x − momentᵀ·x, gram positive definite.

    Lawson and Hanson's active set method, on the normal equations as Bro and
    de Jong (1997) proposed: variables enter one at a time where the gradient
    falls, and leave when the unconstrained solution would make them negative.
    """
    x = np.zeros_like(moment)
    free = np.zeros(len(moment), dtype=bool)
    tolerance = 1e-12 * np.abs(moment).max(initial=1.0)
    # Each round strictly improves x, so no free set returns; the bound only stops rounding cycles.
    for _ in range(3 * len(moment)):
        descent = np.where(free, -np.inf, moment - gram @ x)
        entering = int(descent.argmax())
        if descent[entering] <= tolerance:
            break
        free[entering] = True
        while True:
            target = np.zeros_like(x)
            target[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            falling = free & (target <= 0)
            if not falling.any():
                break
            # Walk towards the target until the first variable reaches zero; it leaves.
            steps = x[falling] / (x[falling] - target[falling])
            x += steps.min() * (target - x)
            free[falling & (x <= tolerance)] = False
            free[np.flatnonzero(falling)[steps.argmin()]] = False
            x[~free] = 0.0
        x = target
    return x


def _reject_ambiguous(gram: Floats, names: Sequence[str]) -> None:
    eigenvalues, eigenvectors = np.linalg.eigh(gram)
    silent = eigenvectors[:, eigenvalues <= _RANK_TOLERANCE * eigenvalues[-1]]
    if not silent.size:
        return
    # Any combination of them leaves the predictions as they are.
    parts = np.linalg.norm(silent, axis=1)
    tied = [name for name, part in zip(names, parts, strict=True) if part > 0.1]
    raise InputFileError(
        f"samples: they do not tell {', '.join(tied)} apart: "
        "vary prompt length, cached context and number of requests independently"
    )
