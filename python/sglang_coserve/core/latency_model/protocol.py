"""What a latency model promises to the scheduler, the profiler and the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol, Self

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.latency_model.fitting import Fit
from sglang_coserve.core.latency_model.samples import Floats, Sample, SampleTable

__all__ = ["LatencyModel", "assert_coefficients"]


class LatencyModel(Protocol):
    """How long one iteration takes, as a function of sums over its rows.

    An implementation is a frozen dataclass. Its *coefficients* are seconds per unit of some
    work, finite and never negative: so a prediction never shrinks when a batch grows, and never
    is negative, however far from the measured batches. The rest is its *form*, which a fit does
    not change. A regression is made with coefficients of zero, as a form to fit.
    """

    @property
    def kind(self) -> str:
        """Names the model in a saved profile."""
        ...

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The coefficients by name, in the order of ``contributions``."""
        ...

    def with_coefficients(self, values: Mapping[str, float]) -> Self:
        """Return the same form with the named coefficients replaced."""
        ...

    def predict(self, batch: BatchStats) -> float:
        """Return the seconds this batch takes; 0 for a batch without rows. O(1)."""
        ...

    def max_prefill_tokens(
        self, batch: BatchStats, context_tokens: int, limit_tokens: int, budget_s: float
    ) -> int:
        """Return the longest prefill chunk that may join the batch.

        The chunk belongs to a request with ``context_tokens`` already computed
        and ``limit_tokens`` left. The result n is at most ``limit_tokens``;
        with a row of n tokens ``predict`` stays within ``budget_s``, with n + 1
        it does not. 0 when not even one token fits.
        """
        ...

    def contributions(self, table: SampleTable) -> Floats:
        """Return the seconds that each coefficient adds to each batch.

        The shape is (n, number of coefficients); a row sums to ``predict`` of
        its batch. ``table.seconds`` is not used.
        """
        ...

    def fit(self, samples: Iterable[Sample] | SampleTable, *, seed: int = 0) -> Fit[Self]:
        """Return a new model of the same form that fits the samples.

        Least squares of the relative error, because MAPE is what matters; the
        report is on held-out samples, drawn with ``seed``.

        Raises:
            InputFileError: the samples are too few or too alike to determine
                every coefficient; the message says what to measure.
        """
        ...

    def form(self) -> dict[str, object]:
        """Return what is not a coefficient, ready for JSON."""
        ...


def assert_coefficients(model: LatencyModel) -> None:
    """Check the invariant that makes every prediction monotone and non-negative."""
    for name, value in model.coefficients.items():
        assert math.isfinite(value) and value >= 0, f"{model.kind}: {name} = {value}"
