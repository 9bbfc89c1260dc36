"""The papers' linear models: one class with different feature sets, all made of the same sums.

They are fitted by non-negative least squares on the relative error.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sglang_coserve.core.latency_model.model import Floats, LatencyModel, SampleTable
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import InputFileError

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


@dataclass(frozen=True, slots=True)
class FeatureSet:
    """The features of a linear model."""

    kind: str
    """The name of the model in a saved profile."""

    features: Mapping[str, tuple[str, ...]]
    """The coefficients, in seconds per unit of their feature; each with the entries of ``SUMS``
    whose sum the feature is."""

    replay_coefficients: tuple[str, ...] = ()
    """Coefficients of batches that replay a decode CUDA graph; empty if these are not modelled."""

    @property
    def coefficient_names(self) -> tuple[str, ...]:
        """Names of all coefficients, those of replayed graphs last."""
        return (*self.features, *self.replay_coefficients)

    def prices(self, coefficients: Mapping[str, float]) -> tuple[float, ...]:
        """Return the seconds per unit of each of ``SUMS``."""
        prices = dict.fromkeys(SUMS, 0.0)
        for name, sums in self.features.items():
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
        terms = [
            np.sum([columns[name] for name in sums], axis=0) for sums in self.features.values()
        ]
        return np.column_stack(terms).astype(np.float64)


CONSERVE: Final = FeatureSet(
    "polynomial",
    {
        "compute_token_s": ("prefill_tokens", "decode_requests"),
        "attention_pair_s": ("prefill_attention_pairs", "decode_context_tokens"),
        "context_token_s": ("prefill_tokens", "prefill_context_tokens", "decode_context_tokens"),
        "prefill_request_s": ("prefill_requests",),
        "decode_request_s": ("decode_requests",),
        "iteration_s": ("has_requests",),
    },
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
    {
        "prefill_token_s": ("prefill_tokens",),
        "prefill_token_squared_s": ("prefill_tokens_squared",),
        "prefill_request_s": ("prefill_requests",),
        "decode_token_s": ("decode_context_tokens",),
        "decode_token_squared_s": ("decode_context_tokens_squared",),
        "decode_request_s": ("decode_requests",),
        "iteration_s": ("has_requests",),
    },
)
"""T = f(S_p, S_d, S_p², S_d², N_p, N_d), linear, plus a constant (HyGen §4.2, Eq. 1).

S_p does not count cached tokens, so a chunk costs the same at any depth of
its prompt: use this model for prompts that fit one chunk.
"""

BROS: Final = FeatureSet(
    "split_linear",
    {
        "prefill_token_s": ("prefill_tokens",),
        "prefill_pair_s": ("prefill_attention_pairs",),
        "prefill_s": ("has_prefills",),
        "decode_request_s": ("decode_requests",),
        "decode_pair_s": ("decode_context_tokens",),
        "decode_s": ("has_decodes",),
    },
)
"""α0·Lⁿ + α1·Lⁿ·Lᵃ + β for prefill requests, and again for decode requests, summed (BROS §IV-A).

Lⁿ are the tokens to compute and Lᵃ the keys they attend to. Lⁿ·Lᵃ is taken request by request,
because requests do not attend to each other; and a prefill's Lᵃ counts its cached tokens,
which the paper's prefills do not have. The time is the paper's t_exec: no step waits for KV
from the host. A fit on samples without mixed batches is the paper's two separate ones.
"""

FEATURE_SETS: Final = MappingProxyType({each.kind: each for each in (CONSERVE, HYGEN, BROS)})
"""By kind."""

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


@dataclass(frozen=True, slots=True)
class LinearModel(LatencyModel):
    """T = Σ coefficient · feature, with ConServe's, HyGen's or BROS's features; built by ``of``.

    A decode-only batch that replays a CUDA graph runs at the next captured batch size and
    without the launch costs of other batches. With ``captured_batch_sizes`` (ConServe's
    features only) such batches have a separate formula,

        T = g1·captured(N) + g2·Σ(C + 1) + g3,

    which is also a lower bound for batches with the same decodes: adding a prefill
    never makes a step shorter.
    """

    features: FeatureSet
    coefficients: Mapping[str, float]
    captured_batch_sizes: tuple[int, ...] = ()
    """Batch sizes of the decode CUDA graphs, ascending; empty when none is captured."""

    _prices: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """Seconds per unit of each of ``SUMS``, so that ``predict`` is the same for all features."""

    _replay_prices: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert tuple(self.coefficients) == self.features.coefficient_names
        self.assert_coefficients()
        assert self.features.replay_coefficients or not self.captured_batch_sizes
        sizes = (0, *self.captured_batch_sizes)
        assert all(a < b for a, b in pairwise(sizes)), f"not ascending: {sizes}"
        object.__setattr__(self, "_prices", self.features.prices(self.coefficients))
        replay = tuple(self.coefficients[name] for name in self.features.replay_coefficients)
        object.__setattr__(self, "_replay_prices", replay)

    @classmethod
    def of(
        cls,
        features: FeatureSet,
        *,
        captured_batch_sizes: tuple[int, ...] = (),
        **coefficients: float,
    ) -> LinearModel:
        """Return a model with the given coefficients; the others are zero."""
        values = dict.fromkeys(features.coefficient_names, 0.0)
        return cls(features, values | coefficients, captured_batch_sizes)

    @property
    def kind(self) -> str:
        """See ``LatencyModel.kind``."""
        return self.features.kind

    def predict(self, batch: StepStats) -> float:
        """See ``LatencyModel.predict``."""
        prefills, prefill_tokens, prefill_context, pairs, decodes, decode_tokens = batch
        (
            prefill_request_s,
            prefill_token_s,
            prefill_context_s,
            prefill_pair_s,
            prefill_token_squared_s,
            any_prefill_s,
            decode_request_s,
            decode_token_s,
            decode_token_squared_s,
            any_decode_s,
            any_request_s,
        ) = self._prices
        if not prefills and not decodes:
            return 0.0
        seconds = any_request_s
        if prefills:
            seconds += (
                prefill_token_s * prefill_tokens
                + prefill_pair_s * pairs
                + prefill_context_s * prefill_context
                + prefill_token_squared_s * prefill_tokens * prefill_tokens
                + prefill_request_s * prefills
                + any_prefill_s
            )
        if not decodes:
            return seconds
        seconds += (
            decode_request_s * decodes
            + decode_token_s * decode_tokens
            + decode_token_squared_s * decode_tokens * decode_tokens
            + any_decode_s
        )
        return self._with_graphs(seconds, batch) if self.captured_batch_sizes else seconds

    def contributions(self, table: SampleTable) -> Floats:
        """See ``LatencyModel.contributions``."""
        values = np.array(list(self.coefficients.values()))
        num_features = len(self.features.features)
        eager = self.features.terms(table) * values[:num_features]
        if not self.captured_batch_sizes:
            return np.hstack([eager, np.zeros((len(table), len(values) - num_features))])
        replay = self._replay_terms(table) * values[num_features:]
        use_replay = self._is_replayed(table) | (
            (table.decode_requests > 0) & (replay.sum(axis=1) > eager.sum(axis=1))
        )
        return _choose(use_replay, eager, replay)

    def form(self) -> dict[str, object]:
        """See ``LatencyModel.form``."""
        if not self.features.replay_coefficients:
            return {}
        return {"captured_batch_sizes": list(self.captured_batch_sizes)}

    def _with_graphs(self, eager_s: float, batch: StepStats) -> float:
        sizes, decodes = self.captured_batch_sizes, batch.decode_requests
        row_s, context_token_s, iteration_s = self._replay_prices
        replayable = decodes <= sizes[-1]
        rows = sizes[bisect_left(sizes, decodes)] if replayable else decodes
        replay_s = row_s * rows + context_token_s * batch.decode_context_tokens + iteration_s
        if replayable and batch.prefill_requests == 0:
            return replay_s
        return max(eager_s, replay_s)

    def fitted(self, table: SampleTable) -> LinearModel:
        """See ``LatencyModel.fitted``.

        With captured batch sizes the samples must include decode-only and
        mixed batches, because the two formulas are fitted separately.
        """
        terms = self.features.terms(table)
        names = self.features.coefficient_names[: len(self.features.features)]
        if self.captured_batch_sizes:
            # Each batch has non-zero terms of one formula only, so this is two separate fits. The
            # lower bound of mixed batches is ignored, as it hardly ever applies.
            terms = _choose(self._is_replayed(table), terms, self._replay_terms(table))
            names = self.features.coefficient_names
        return self.with_coefficients(fit_relative(terms, table.seconds, names))

    def _is_replayed(self, table: SampleTable) -> NDArray[np.bool_]:
        largest = self.captured_batch_sizes[-1]
        replayed: NDArray[np.bool_] = (table.prefill_requests == 0) & (
            table.decode_requests <= largest
        )
        return replayed

    def _replay_terms(self, table: SampleTable) -> Floats:
        sizes = np.array(self.captured_batch_sizes)
        next_size = np.minimum(np.searchsorted(sizes, table.decode_requests), len(sizes) - 1)
        rows = np.maximum(sizes[next_size], table.decode_requests)
        return np.column_stack([rows, table.decode_context_tokens, np.ones(len(table))])


def _choose(use_replay: NDArray[np.bool_], eager: Floats, replay: Floats) -> Floats:
    mask = use_replay[:, np.newaxis]
    return np.hstack([eager * ~mask, replay * mask])
