"""Non-negative least squares on the relative error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from sglang_coserve.core.latency_model.samples import Floats
from sglang_coserve.errors import InputFileError

__all__ = ["fit_relative"]

# Eigenvalues below this share of the largest are rounding errors: the direction was not measured.
_RANK_TOLERANCE: Final = 1e-11


def fit_relative(terms: Floats, seconds: Floats, names: Sequence[str]) -> dict[str, float]:
    """Return the coefficients c ≥ 0 that minimise Σ((terms·c − seconds) / seconds)².

    ``terms`` has shape (n, k), ``seconds`` (n,); ``names`` are the k
    coefficients. O(n·k²).

    Raises:
        InputFileError: the samples leave some coefficient undetermined.
    """
    # Only fits need scipy, and only `coserve profile` fits: the extra `engine` brings it.
    from scipy.optimize import nnls

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
    # Columns differ by ten orders of magnitude (a constant and ΣP·(P + C)): scale to unit norm.
    relative /= scale
    # QR reduces the problem to as many rows as columns, with the same least squares.
    orthogonal, triangle = np.linalg.qr(relative)
    _reject_ambiguous(triangle.T @ triangle, names)
    solution = nnls(triangle, orthogonal.sum(axis=0))[0] / scale
    return dict(zip(names, solution.tolist(), strict=True))


def _reject_ambiguous(gram: Floats, names: Sequence[str]) -> None:
    eigenvalues, eigenvectors = np.linalg.eigh(gram)
    silent = eigenvectors[:, eigenvalues <= _RANK_TOLERANCE * eigenvalues[-1]]
    if not silent.size:
        return
    # Moving along these directions does not change the predictions.
    parts = np.linalg.norm(silent, axis=1)
    tied = [name for name, part in zip(names, parts, strict=True) if part > 0.1]
    raise InputFileError(
        f"samples: they do not tell {', '.join(tied)} apart: "
        "vary prompt length, cached context and number of requests independently"
    )
