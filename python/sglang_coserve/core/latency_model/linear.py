"""The papers' linear models: one class with different feature sets.

They are fitted by non-negative least squares on the relative error.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sglang_coserve.core.latency_model.features import FeatureSet
from sglang_coserve.core.latency_model.fitting import Fit, fit_and_report
from sglang_coserve.core.latency_model.prefill_search import longest_prefill, solve_chunk
from sglang_coserve.core.latency_model.protocol import assert_coefficients
from sglang_coserve.core.latency_model.samples import Floats, Sample, SampleTable
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import InputFileError

__all__ = ["LinearModel", "fit_relative"]

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
class LinearModel:
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
        assert_coefficients(self)
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

    def with_coefficients(self, values: Mapping[str, float]) -> LinearModel:
        """See ``LatencyModel.with_coefficients``."""
        return replace(self, coefficients={**self.coefficients, **values})

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

    def max_prefill_tokens(
        self, batch: StepStats, context_tokens: int, limit_tokens: int, budget_s: float
    ) -> int:
        """See ``LatencyModel.max_prefill_tokens``; starts from a closed-form solution."""
        # Beyond the first token, m more add m·(C + 2) + m² to ΣP·(P + C), 2·S_p·m + m² to S_p².
        first = batch.with_prefill(1, context_tokens)
        token_s, _, pair_s, token_squared_s = self._prices[1:5]
        slope_s = (
            token_s + pair_s * (context_tokens + 2) + 2 * token_squared_s * first.prefill_tokens
        )
        slack_s = budget_s - self.predict(first)
        more = solve_chunk(slack_s, slope_s, pair_s + token_squared_s)
        return longest_prefill(self, batch, context_tokens, limit_tokens, budget_s, 1 + more)

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

    def fit(self, samples: Iterable[Sample] | SampleTable, *, seed: int = 0) -> Fit[LinearModel]:
        """See ``LatencyModel.fit``.

        With captured batch sizes the samples must include decode-only and
        mixed batches, because the two formulas are fitted separately.
        """
        return fit_and_report(self._fit_all, samples, seed)

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

    def _fit_all(self, table: SampleTable) -> LinearModel:
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
