"""ConServe's context-aware polynomial."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

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

__all__ = ["PolynomialModel"]

_EAGER_TERMS = 6


@dataclass(frozen=True, slots=True)
class PolynomialModel:
    """T = k1·ΣP + k2·ΣP·(P + C) + k4·Σ(P + C) + k5 (ConServe §4.2), and a price of each row.

    The paper's communication term k3·P multiplies the same P as k1, so only
    k1 + k3 can be measured: one coefficient, valid for one tensor-parallel size.

    The paper has no term for rows. It profiles a GPU, where one kernel serves
    all rows; elsewhere each row has kernels of its own, and the work of a row
    that does not depend on its length (logits, sampling) is no token's. Prefill
    and decode rows have a coefficient each, because their kernels differ.

    A decode-only batch that replays a CUDA graph runs as the next captured
    batch size and without the launch costs of the other batches. With
    ``captured_batch_sizes`` such batches have a line of their own,

        T = g1·captured(N) + g2·Σ(C + 1) + g3,

    which is also the least that a batch with the same decodes takes: a prefill
    that joins never makes an iteration shorter.
    """

    compute_token_s: float = 0.0
    """k1 + k3, of ΣP."""

    attention_pair_s: float = 0.0
    """k2, of ΣP·(P + C)."""

    context_token_s: float = 0.0
    """k4, of Σ(P + C)."""

    prefill_request_s: float = 0.0
    """Of each prefill row."""

    decode_request_s: float = 0.0
    """Of each decode row."""

    iteration_s: float = 0.0
    """k5."""

    graph_row_s: float = 0.0
    """g1, of the captured batch size replayed."""

    graph_context_token_s: float = 0.0
    """g2, of Σ(C + 1)."""

    graph_iteration_s: float = 0.0
    """g3."""

    captured_batch_sizes: tuple[int, ...] = ()
    """Of the decode CUDA graphs, ascending; empty when nothing is captured."""

    kind: ClassVar[str] = "polynomial"
    coefficient_names: ClassVar[tuple[str, ...]] = (
        "compute_token_s",
        "attention_pair_s",
        "context_token_s",
        "prefill_request_s",
        "decode_request_s",
        "iteration_s",
        "graph_row_s",
        "graph_context_token_s",
        "graph_iteration_s",
    )

    def __post_init__(self) -> None:
        assert_coefficients(self)
        sizes = (0, *self.captured_batch_sizes)
        assert all(a < b for a, b in pairwise(sizes)), f"not ascending: {sizes}"

    def predict(self, batch: BatchStats) -> float:
        """See ``LatencyModel.predict``."""
        if batch.is_empty:
            return 0.0
        decodes = batch.decode_requests
        eager_s = (
            self.compute_token_s * (batch.prefill_tokens + decodes)
            + self.attention_pair_s * batch.attention_pairs
            + self.context_token_s * batch.total_tokens
            + self.prefill_request_s * batch.prefill_requests
            + self.decode_request_s * decodes
            + self.iteration_s
        )
        sizes = self.captured_batch_sizes
        if not sizes or decodes == 0:
            return eager_s
        replayable = decodes <= sizes[-1]
        graph_rows = sizes[bisect_left(sizes, decodes)] if replayable else decodes
        replay_s = (
            self.graph_row_s * graph_rows
            + self.graph_context_token_s * batch.decode_context_tokens
            + self.graph_iteration_s
        )
        if replayable and batch.prefill_requests == 0:
            return replay_s
        return max(eager_s, replay_s)

    def max_prefill_tokens(
        self, batch: BatchStats, context_tokens: int, limit_tokens: int, budget_s: float
    ) -> int:
        """See ``LatencyModel.max_prefill_tokens``; closed form."""
        # Beyond the first token, m more add m·(C + 2) + m² to ΣP·(P + C).
        first_s = self.predict(batch.with_prefill(1, context_tokens))
        slope_s = (
            self.compute_token_s
            + self.context_token_s
            + self.attention_pair_s * (context_tokens + 2)
        )
        more = solve_chunk(budget_s - first_s, slope_s, self.attention_pair_s)
        return longest_prefill(self, batch, context_tokens, limit_tokens, budget_s, 1 + more)

    def contributions(self, table: SampleTable) -> Floats:
        """See ``LatencyModel.contributions``."""
        values = coefficient_vector(self)
        eager = self._eager_terms(table) * values[:_EAGER_TERMS]
        if not self.captured_batch_sizes:
            return np.hstack([eager, np.zeros((len(table), len(values) - _EAGER_TERMS))])
        replay = self._graph_terms(table) * values[_EAGER_TERMS:]
        use_replay = self._is_replayed(table) | (
            (table.decode_requests > 0) & (replay.sum(axis=1) > eager.sum(axis=1))
        )
        return _choose(use_replay, eager, replay)

    def fit(
        self, samples: Iterable[Sample] | SampleTable, *, seed: int = 0
    ) -> Fit[PolynomialModel]:
        """See ``LatencyModel.fit``.

        With captured batch sizes the samples must hold decode-only batches and
        mixed ones, because the two parts are fitted apart.
        """
        return fit_and_report(self._fit_all, samples, seed)

    def form(self) -> dict[str, object]:
        """See ``LatencyModel.form``."""
        return {"captured_batch_sizes": list(self.captured_batch_sizes)}

    @classmethod
    def from_form(cls, form: JsonObject) -> PolynomialModel:
        """Return a model without coefficients.

        Raises:
            InputFileError: a field is missing or malformed.
        """
        sizes = form.integers("captured_batch_sizes", minimum=1)
        if list(sizes) != sorted(set(sizes)):
            form.fail("captured_batch_sizes", "must ascend, without repetition")
        return cls(captured_batch_sizes=sizes)

    def _fit_all(self, table: SampleTable) -> PolynomialModel:
        eager_terms = self._eager_terms(table)
        if not self.captured_batch_sizes:
            names = self.coefficient_names[:_EAGER_TERMS]
            return with_coefficients(self, fit_relative(eager_terms, table.seconds, names))
        # Each batch has work in one part only, so this one fit is two separate ones. The lower
        # bound of mixed batches is not part of it: a machine hardly ever reaches that.
        terms = _choose(self._is_replayed(table), eager_terms, self._graph_terms(table))
        values = fit_relative(terms, table.seconds, self.coefficient_names)
        return with_coefficients(self, values)

    def _is_replayed(self, table: SampleTable) -> NDArray[np.bool_]:
        largest = self.captured_batch_sizes[-1]
        replayed: NDArray[np.bool_] = (table.prefill_requests == 0) & (
            table.decode_requests <= largest
        )
        return replayed

    @staticmethod
    def _eager_terms(table: SampleTable) -> Floats:
        return np.column_stack(
            [
                table.compute_tokens,
                table.attention_pairs,
                table.total_tokens,
                table.prefill_requests,
                table.decode_requests,
                np.ones(len(table)),
            ]
        )

    def _graph_terms(self, table: SampleTable) -> Floats:
        sizes = np.array(self.captured_batch_sizes)
        next_size = np.minimum(np.searchsorted(sizes, table.decode_requests), len(sizes) - 1)
        rows = np.maximum(sizes[next_size], table.decode_requests)
        return np.column_stack([rows, table.decode_context_tokens, np.ones(len(table))])


def _choose(use_replay: NDArray[np.bool_], eager: Floats, replay: Floats) -> Floats:
    mask = use_replay[:, np.newaxis]
    return np.hstack([eager * ~mask, replay * mask])
