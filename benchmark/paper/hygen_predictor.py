"""HyGen's latency predictor (§4.2, Eq. 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from sglang_coserve.core.latency_model.model import Floats, LatencyModel, SampleTable
from sglang_coserve.core.latency_model.polynomial import fit_relative
from sglang_coserve.core.step_stats import StepStats

_COEFFICIENTS: Final = (
    *("prefill_token_s", "prefill_token_squared_s", "prefill_request_s"),
    *("decode_token_s", "decode_token_squared_s", "decode_request_s", "iteration_s"),
)


@dataclass(frozen=True, slots=True)
class HygenModel(LatencyModel):
    """T = f(S_p, S_d, S_p², S_d², N_p, N_d), linear, plus a constant.

    S_p does not count cached tokens, so a chunk costs the same at any depth of its prompt.
    """

    kind: ClassVar[str] = "linear"

    coefficients: Mapping[str, float] = field(
        default_factory=lambda: dict.fromkeys(_COEFFICIENTS, 0.0)
    )

    def form(self) -> dict[str, object]:
        """See ``LatencyModel.form``."""
        return {}

    def predict(self, batch: StepStats) -> float:
        """See ``LatencyModel.predict``."""
        if batch.is_empty:
            return 0.0
        prefill_s, prefill_squared_s, request_s, context_s, context_squared_s, decode_s, seconds = (
            self.coefficients.values()
        )
        prompt, context = batch.prefill_tokens, batch.decode_context_tokens
        seconds += (
            prefill_s * prompt
            + prefill_squared_s * prompt * prompt
            + request_s * batch.prefill_requests
        )
        return seconds + (
            decode_s * batch.decode_requests
            + context_s * context
            + context_squared_s * context * context
        )

    def contributions(self, table: SampleTable) -> Floats:
        """See ``LatencyModel.contributions``."""
        seconds: Floats = _terms(table) * np.array(list(self.coefficients.values()))
        return seconds

    def fitted(self, table: SampleTable) -> HygenModel:
        """See ``LatencyModel.fitted``."""
        return self.with_coefficients(fit_relative(_terms(table), table.seconds, _COEFFICIENTS))


def _terms(table: SampleTable) -> Floats:
    prompt = table.prefill_tokens.astype(np.float64)
    context = table.decode_context_tokens.astype(np.float64)
    columns = (
        *(prompt, prompt**2, table.prefill_requests),
        *(context, context**2, table.decode_requests, np.ones(len(table))),
    )
    return np.column_stack(columns).astype(np.float64)
