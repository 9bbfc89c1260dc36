"""The feature sets of the papers' linear models, all made of the same sums over a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from sglang_coserve.core.latency_model.samples import Floats, SampleTable

__all__ = ["BROS", "CONSERVE", "FEATURE_SETS", "HYGEN", "SUMS", "FeatureSet"]

SUMS: Final = (
    "prefill_requests",
    "prefill_tokens",
    "prefill_context_tokens",
    "prefill_attention_pairs",
    "prefill_tokens_squared",
    "has_prefills",
    "decode_requests",
    "decode_context_tokens",
    "decode_context_tokens_squared",
    "has_decodes",
    "has_requests",
)
"""The terms that features are made of: the fields of ``StepStats``, the squares of two of them,
and indicators (1 if the batch has prefills, decodes, or any requests)."""


class Feature(NamedTuple):
    """The factor that a coefficient multiplies."""

    coefficient: str
    """Name of the coefficient; its value is in seconds per unit of the feature."""

    sums: tuple[str, ...]
    """The entries of ``SUMS`` whose sum is the feature."""


@dataclass(frozen=True, slots=True)
class FeatureSet:
    """The features of a linear model."""

    kind: str
    """The name of the model in a saved profile."""

    features: tuple[Feature, ...]

    replay_coefficients: tuple[str, ...] = ()
    """Coefficients of batches that replay a decode CUDA graph; empty if these are not modelled."""

    @property
    def coefficient_names(self) -> tuple[str, ...]:
        """Names of all coefficients, those of replayed graphs last."""
        return (*(name for name, _ in self.features), *self.replay_coefficients)

    def prices(self, coefficients: Mapping[str, float]) -> tuple[float, ...]:
        """Return the seconds per unit of each of ``SUMS``."""
        prices = dict.fromkeys(SUMS, 0.0)
        for name, sums in self.features:
            for added in sums:
                prices[added] += coefficients[name]
        return tuple(prices.values())

    def terms(self, table: SampleTable) -> Floats:
        """Return the features of every batch; the shape is (n, number of features)."""
        prefill_tokens = table.prefill_tokens.astype(np.float64)
        decode_tokens = table.decode_context_tokens.astype(np.float64)
        columns = {
            "prefill_requests": table.prefill_requests,
            "prefill_tokens": prefill_tokens,
            "prefill_context_tokens": table.prefill_context_tokens,
            "prefill_attention_pairs": table.prefill_attention_pairs,
            "prefill_tokens_squared": prefill_tokens**2,
            "has_prefills": table.prefill_requests > 0,
            "decode_requests": table.decode_requests,
            "decode_context_tokens": decode_tokens,
            "decode_context_tokens_squared": decode_tokens**2,
            "has_decodes": table.decode_requests > 0,
            "has_requests": np.ones(len(table)),
        }
        terms = [np.sum([columns[name] for name in sums], axis=0) for _, sums in self.features]
        return np.column_stack(terms).astype(np.float64)


CONSERVE: Final = FeatureSet(
    "polynomial",
    (
        Feature("compute_token_s", ("prefill_tokens", "decode_requests")),
        Feature("attention_pair_s", ("prefill_attention_pairs", "decode_context_tokens")),
        Feature(
            "context_token_s",
            ("prefill_tokens", "prefill_context_tokens", "decode_context_tokens"),
        ),
        Feature("prefill_request_s", ("prefill_requests",)),
        Feature("decode_request_s", ("decode_requests",)),
        Feature("iteration_s", ("has_requests",)),
    ),
    replay_coefficients=("graph_row_s", "graph_context_token_s", "graph_iteration_s"),
)
"""T = k1·ΣP + k2·ΣP·(P + C) + k4·Σ(P + C) + k5 (ConServe §4.2), plus a cost per request.

The paper's communication term k3·P multiplies the same P as k1, so only k1 + k3 can be
measured: one coefficient, valid for one tensor-parallel size.

The paper has no term for requests. It profiles a GPU, where one kernel serves all requests;
elsewhere each request has kernels of its own, and some work of a request (logits, sampling) does
not depend on its length. Prefill and decode requests have separate coefficients, because their
kernels differ.
"""

HYGEN: Final = FeatureSet(
    "linear",
    (
        Feature("prefill_token_s", ("prefill_tokens",)),
        Feature("prefill_token_squared_s", ("prefill_tokens_squared",)),
        Feature("prefill_request_s", ("prefill_requests",)),
        Feature("decode_token_s", ("decode_context_tokens",)),
        Feature("decode_token_squared_s", ("decode_context_tokens_squared",)),
        Feature("decode_request_s", ("decode_requests",)),
        Feature("iteration_s", ("has_requests",)),
    ),
)
"""T = f(S_p, S_d, S_p², S_d², N_p, N_d), linear, plus a constant (HyGen §4.2, Eq. 1).

S_p does not count cached tokens, so a chunk costs the same at any depth of
its prompt: use this model for prompts that fit one chunk.
"""

BROS: Final = FeatureSet(
    "split_linear",
    (
        Feature("prefill_token_s", ("prefill_tokens",)),
        Feature("prefill_pair_s", ("prefill_attention_pairs",)),
        Feature("prefill_s", ("has_prefills",)),
        Feature("decode_request_s", ("decode_requests",)),
        Feature("decode_pair_s", ("decode_context_tokens",)),
        Feature("decode_s", ("has_decodes",)),
    ),
)
"""α0·Lⁿ + α1·Lⁿ·Lᵃ + β for prefill requests, and again for decode requests, summed (BROS §IV-A).

Lⁿ are the tokens to compute and Lᵃ the keys they attend to. Lⁿ·Lᵃ is taken request by request,
because requests do not attend to each other; and a prefill's Lᵃ counts its cached tokens,
which the paper's prefills do not have. The time is the paper's t_exec: no step waits for KV
from the host. A fit on samples without mixed batches is the paper's two separate ones.
"""

FEATURE_SETS: Final = MappingProxyType({each.kind: each for each in (CONSERVE, HYGEN, BROS)})
"""By kind."""
