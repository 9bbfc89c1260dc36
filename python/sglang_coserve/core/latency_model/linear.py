"""HyGen's linear regression."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.latency_model.fitting import Fit, fit_and_report
from sglang_coserve.core.latency_model.json_object import JsonObject
from sglang_coserve.core.latency_model.least_squares import fit_relative
from sglang_coserve.core.latency_model.prefill_search import longest_prefill, solve_chunk
from sglang_coserve.core.latency_model.protocol import (
    assert_coefficients,
    coefficient_vector,
    with_coefficients,
)
from sglang_coserve.core.latency_model.samples import Floats, Sample, SampleTable

__all__ = ["LinearModel"]


@dataclass(frozen=True, slots=True)
class LinearModel:
    """T = f(S_p, S_d, S_p², S_d², N_p, N_d), linear, plus a constant (HyGen §4.2, Eq. 1).

    S_p does not count what a prefill finds cached, so a chunk costs the same
    at any depth of its prompt: choose it for prompts that fit one chunk.
    """

    prefill_token_s: float = 0.0
    """Of S_p, the prompt tokens computed."""

    prefill_token_squared_s: float = 0.0
    """Of S_p²."""

    prefill_request_s: float = 0.0
    """Of N_p."""

    decode_token_s: float = 0.0
    """Of S_d, the keys that decodes read."""

    decode_token_squared_s: float = 0.0
    """Of S_d²."""

    decode_request_s: float = 0.0
    """Of N_d."""

    iteration_s: float = 0.0
    """The constant."""

    kind: ClassVar[str] = "linear"
    coefficient_names: ClassVar[tuple[str, ...]] = (
        "prefill_token_s",
        "prefill_token_squared_s",
        "prefill_request_s",
        "decode_token_s",
        "decode_token_squared_s",
        "decode_request_s",
        "iteration_s",
    )

    def __post_init__(self) -> None:
        assert_coefficients(self)

    def predict(self, batch: BatchStats) -> float:
        """See ``LatencyModel.predict``."""
        if batch.is_empty:
            return 0.0
        prefill_tokens = batch.prefill_tokens
        decode_tokens = batch.decode_context_tokens
        return (
            self.prefill_token_s * prefill_tokens
            + self.prefill_token_squared_s * prefill_tokens * prefill_tokens
            + self.prefill_request_s * batch.prefill_requests
            + self.decode_token_s * decode_tokens
            + self.decode_token_squared_s * decode_tokens * decode_tokens
            + self.decode_request_s * batch.decode_requests
            + self.iteration_s
        )

    def max_prefill_tokens(
        self, batch: BatchStats, context_tokens: int, limit_tokens: int, budget_s: float
    ) -> int:
        """See ``LatencyModel.max_prefill_tokens``; closed form."""
        # Beyond the first token, m more add (S_p + m)² − S_p² = 2·S_p·m + m² to S_p².
        first = batch.with_prefill(1, context_tokens)
        slope_s = self.prefill_token_s + 2 * self.prefill_token_squared_s * first.prefill_tokens
        more = solve_chunk(budget_s - self.predict(first), slope_s, self.prefill_token_squared_s)
        return longest_prefill(self, batch, context_tokens, limit_tokens, budget_s, 1 + more)

    def contributions(self, table: SampleTable) -> Floats:
        """See ``LatencyModel.contributions``."""
        return self._terms(table) * coefficient_vector(self)

    def fit(self, samples: Iterable[Sample] | SampleTable, *, seed: int = 0) -> Fit[LinearModel]:
        """See ``LatencyModel.fit``."""
        return fit_and_report(self._fit_all, samples, seed)

    def form(self) -> dict[str, object]:
        """See ``LatencyModel.form``; there is nothing but coefficients."""
        return {}

    @classmethod
    def from_form(cls, _form: JsonObject) -> LinearModel:
        """Return a model without coefficients."""
        return cls()

    def _fit_all(self, table: SampleTable) -> LinearModel:
        values = fit_relative(self._terms(table), table.seconds, self.coefficient_names)
        return with_coefficients(self, values)

    @staticmethod
    def _terms(table: SampleTable) -> Floats:
        prefill_tokens = table.prefill_tokens.astype(np.float64)
        decode_tokens = table.decode_context_tokens.astype(np.float64)
        return np.column_stack(
            [
                prefill_tokens,
                prefill_tokens**2,
                table.prefill_requests,
                decode_tokens,
                decode_tokens**2,
                table.decode_requests,
                np.ones(len(table)),
            ]
        )
