"""ConServe's latency model: a polynomial, fitted by non-negative least squares."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from sglang_coserve.core.latency_model.model import Floats, LatencyModel, SampleTable
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import InputFileError

EAGER: Final = (
    *("compute_token_s", "attention_pair_s", "context_token_s"),
    *("prefill_request_s", "decode_request_s", "iteration_s"),
)
"""Names of the coefficients of batches that replay no CUDA graph."""

_REPLAY: Final = ("graph_row_s", "graph_context_token_s", "graph_iteration_s")
_COEFFICIENTS: Final = (*EAGER, *_REPLAY)

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
class PolynomialModel(LatencyModel):
    """T = k1·ΣP + k2·ΣP·(P + C) + k4·Σ(P + C) + k5 (ConServe §4.2), plus a cost per request.

    Built by ``of``. The paper's communication term k3·P multiplies the same P as k1, so only
    k1 + k3 can be measured: one coefficient, valid for one tensor-parallel size.

    The paper has no term for requests. It profiles a GPU, where one kernel serves all requests;
    elsewhere each request has kernels of its own, and some work of a request (logits, sampling)
    does not depend on its length. Prefill and decode requests have separate coefficients, because
    their kernels differ.

    A decode-only batch that replays a CUDA graph runs at the next captured batch size and
    without the launch costs of other batches. With ``captured_batch_sizes`` such batches have a
    separate formula,

        T = g1·captured(N) + g2·Σ(C + 1) + g3,

    which is also a lower bound for batches with the same decodes: adding a prefill
    never makes a step shorter.
    """

    kind: ClassVar[str] = "polynomial"

    coefficients: Mapping[str, float]
    captured_batch_sizes: tuple[int, ...] = ()
    """Batch sizes of the decode CUDA graphs, ascending; empty when none is captured."""

    _prefill_token_s: float = field(init=False, repr=False, compare=False)
    """Seconds per prompt token to compute, as work and as context."""

    _decode_s: float = field(init=False, repr=False, compare=False)
    """Seconds per decode, without its context."""

    _decode_context_s: float = field(init=False, repr=False, compare=False)
    """Seconds per context token of a decode."""

    def __post_init__(self) -> None:
        assert tuple(self.coefficients) == _COEFFICIENTS
        self.assert_coefficients()
        sizes = (0, *self.captured_batch_sizes)
        assert all(a < b for a, b in pairwise(sizes)), f"not ascending: {sizes}"
        prices = self.coefficients
        for name, added in (
            ("_prefill_token_s", ("compute_token_s", "context_token_s")),
            ("_decode_s", ("compute_token_s", "decode_request_s")),
            ("_decode_context_s", ("attention_pair_s", "context_token_s")),
        ):
            object.__setattr__(self, name, prices[added[0]] + prices[added[1]])

    @classmethod
    def of(
        cls, *, captured_batch_sizes: tuple[int, ...] = (), **coefficients: float
    ) -> PolynomialModel:
        """Return a model with the given coefficients; the others are zero."""
        values = dict.fromkeys(_COEFFICIENTS, 0.0)
        return cls(values | coefficients, captured_batch_sizes)

    def predict(self, batch: StepStats) -> float:
        """See ``LatencyModel.predict``."""
        prefills, prefill_tokens, prefill_context, pairs, decodes, decode_tokens = batch
        if not prefills and not decodes:
            return 0.0
        prices = self.coefficients
        seconds = prices["iteration_s"]
        if prefills:
            seconds += (
                self._prefill_token_s * prefill_tokens
                + prices["attention_pair_s"] * pairs
                + prices["context_token_s"] * prefill_context
                + prices["prefill_request_s"] * prefills
            )
        if not decodes:
            return seconds
        seconds += self._decode_s * decodes + self._decode_context_s * decode_tokens
        return self._with_graphs(seconds, batch) if self.captured_batch_sizes else seconds

    def contributions(self, table: SampleTable) -> Floats:
        """See ``LatencyModel.contributions``."""
        values = np.array(list(self.coefficients.values()))
        eager = _eager_terms(table) * values[: len(EAGER)]
        if not self.captured_batch_sizes:
            return np.hstack([eager, np.zeros((len(table), len(_REPLAY)))])
        replay = self._replay_terms(table) * values[len(EAGER) :]
        use_replay = self._is_replayed(table) | (
            (table.decode_requests > 0) & (replay.sum(axis=1) > eager.sum(axis=1))
        )
        return _choose(use_replay, eager, replay)

    def form(self) -> dict[str, object]:
        """See ``LatencyModel.form``."""
        return {"captured_batch_sizes": list(self.captured_batch_sizes)}

    def _with_graphs(self, eager_s: float, batch: StepStats) -> float:
        sizes, decodes = self.captured_batch_sizes, batch.decode_requests
        row_s, context_token_s, iteration_s = map(self.coefficients.__getitem__, _REPLAY)
        replayable = decodes <= sizes[-1]
        rows = sizes[bisect_left(sizes, decodes)] if replayable else decodes
        replay_s = row_s * rows + context_token_s * batch.decode_context_tokens + iteration_s
        if replayable and batch.prefill_requests == 0:
            return replay_s
        return max(eager_s, replay_s)

    def fitted(self, table: SampleTable) -> PolynomialModel:
        """See ``LatencyModel.fitted``.

        With captured batch sizes the samples must include decode-only and
        mixed batches, because the two formulas are fitted separately.
        """
        terms, names = _eager_terms(table), EAGER
        if not self.captured_batch_sizes:
            return self.with_coefficients(fit_relative(terms, table.seconds, names))
        # Each batch has non-zero terms of one formula only, so this is two separate fits. The
        # lower bound of mixed batches is ignored, as it hardly ever applies.
        terms = _choose(self._is_replayed(table), terms, self._replay_terms(table))
        return self.with_coefficients(fit_relative(terms, table.seconds, _COEFFICIENTS))

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


def _eager_terms(table: SampleTable) -> Floats:
    """Return the terms that the coefficients price; the shape is (n, number of coefficients)."""
    terms = (
        table.prefill_tokens + table.decode_requests,
        table.prefill_attention_pairs + table.decode_context_tokens,
        table.prefill_tokens + table.prefill_context_tokens + table.decode_context_tokens,
        table.prefill_requests,
        table.decode_requests,
        np.ones(len(table)),
    )
    return np.column_stack(terms).astype(np.float64)


def _choose(use_replay: NDArray[np.bool_], eager: Floats, replay: Floats) -> Floats:
    mask = use_replay[:, np.newaxis]
    return np.hstack([eager * ~mask, replay * mask])
