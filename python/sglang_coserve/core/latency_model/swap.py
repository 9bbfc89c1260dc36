"""The time to bring checkpointed KV back from host memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_coserve.core.latency_model.least_squares import fit_relative
from sglang_coserve.core.latency_model.samples import Floats, Ints

__all__ = ["SwapModel"]


@dataclass(frozen=True, slots=True)
class SwapModel:
    """A line in the KV tokens copied (BROS §IV-A, t_swap; the paper counts blocks)."""

    token_s: float
    """Of each token's KV."""

    copy_s: float
    """Of starting a copy at all."""

    def predict(self, tokens: int) -> float:
        """Return the seconds to copy the KV of this many tokens; 0 for none."""
        return self.token_s * tokens + self.copy_s if tokens > 0 else 0.0

    @classmethod
    def fit(cls, tokens: Ints, seconds: Floats) -> SwapModel:
        """Fit measured copies, both arrays of shape (n,), all values positive.

        Raises:
            InputFileError: fewer than two copies, or all of one size.
        """
        terms = np.column_stack([tokens, np.ones(len(tokens))])
        return cls(**fit_relative(terms, seconds, ("token_s", "copy_s")))
