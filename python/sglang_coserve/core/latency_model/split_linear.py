"""BROS's separate linear models of prefill and decode."""

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

__all__ = ["SplitLinearModel"]


@dataclass(frozen=True, slots=True)
class SplitLinearModel:
    """α0·Lⁿ + α1·Lⁿ·Lᵃ + β for prefill rows, and again for decode rows, summed (BROS §IV-A).

    Lⁿ are the tokens to compute and Lᵃ the keys they attend to. Lⁿ·Lᵃ is taken
    row by row, because requests do not attend to each other; and a prefill's
    Lᵃ counts its cached tokens, which the paper's prefills do not have.
    """

    prefill_token_s: float = 0.0
    """α0 of prefill."""

    prefill_pair_s: float = 0.0
    """α1 of prefill, of ΣP·(P + C)."""

    prefill_s: float = 0.0
    """β of prefill."""

    decode_request_s: float = 0.0
    """α0 of decode."""

    decode_pair_s: float = 0.0
    """α1 of decode, of Σ(C + 1)."""

    decode_s: float = 0.0
    """β of decode."""

    kind: ClassVar[str] = "split_linear"
    coefficient_names: ClassVar[tuple[str, ...]] = (
        "prefill_token_s",
        "prefill_pair_s",
        "prefill_s",
        "decode_request_s",
        "decode_pair_s",
        "decode_s",
    )

    def __post_init__(self) -> None:
        assert_coefficients(self)

    def predict(self, batch: BatchStats) -> float:
        """See ``LatencyModel.predict``; the paper's t_exec: no step waits for KV from the host."""
        seconds = 0.0
        if batch.prefill_requests:
            seconds += (
                self.prefill_token_s * batch.prefill_tokens
                + self.prefill_pair_s * batch.prefill_attention_pairs
                + self.prefill_s
            )
        if batch.decode_requests:
            seconds += (
                self.decode_request_s * batch.decode_requests
                + self.decode_pair_s * batch.decode_context_tokens
                + self.decode_s
            )
        return seconds

    def max_prefill_tokens(
        self, batch: BatchStats, context_tokens: int, limit_tokens: int, budget_s: float
    ) -> int:
        """See ``LatencyModel.max_prefill_tokens``; closed form."""
        # Beyond the first token, m more add m·(C + 2) + m² to ΣP·(P + C).
        first_s = self.predict(batch.with_prefill(1, context_tokens))
        slope_s = self.prefill_token_s + self.prefill_pair_s * (context_tokens + 2)
        more = solve_chunk(budget_s - first_s, slope_s, self.prefill_pair_s)
        return longest_prefill(self, batch, context_tokens, limit_tokens, budget_s, 1 + more)

    def contributions(self, table: SampleTable) -> Floats:
        """See ``LatencyModel.contributions``."""
        return self._terms(table) * coefficient_vector(self)

    def fit(
        self, samples: Iterable[Sample] | SampleTable, *, seed: int = 0
    ) -> Fit[SplitLinearModel]:
        """See ``LatencyModel.fit``.

        On samples without mixed batches this is the paper's two separate fits.
        """
        return fit_and_report(self._fit_all, samples, seed)

    def form(self) -> dict[str, object]:
        """See ``LatencyModel.form``; there is nothing but coefficients."""
        return {}

    @classmethod
    def from_form(cls, _form: JsonObject) -> SplitLinearModel:
        """Return a model without coefficients."""
        return cls()

    def _fit_all(self, table: SampleTable) -> SplitLinearModel:
        values = fit_relative(self._terms(table), table.seconds, self.coefficient_names)
        return with_coefficients(self, values)

    @staticmethod
    def _terms(table: SampleTable) -> Floats:
        return np.column_stack(
            [
                table.prefill_tokens,
                table.prefill_attention_pairs,
                table.prefill_requests > 0,
                table.decode_requests,
                table.decode_context_tokens,
                table.decode_requests > 0,
            ]
        ).astype(np.float64)
