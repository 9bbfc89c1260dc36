"""The interface of latency models for the scheduler, the profiler and the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol, Self

from sglang_coserve.core.latency_model.fitting import Fit
from sglang_coserve.core.latency_model.samples import Floats, Sample, SampleTable
from sglang_coserve.core.step_stats import StepStats

__all__ = ["LatencyModel", "assert_coefficients"]


class LatencyModel(Protocol):
    """Predicts the duration of a step from sums over the requests of its batch.

    Implementations are frozen dataclasses. The *coefficients* are seconds per unit of some
    work, finite and never negative; so a prediction is never negative and never shrinks when a
    batch grows, however far from the measured batches. All other fields are the *form*, which a
    fit does not change. A model to be fitted is created with coefficients of zero.
    """

    @property
    def kind(self) -> str:
        """The name of the model in a saved profile."""
        ...

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The coefficients by name, in the order of ``contributions``."""
        ...

    def with_coefficients(self, values: Mapping[str, float]) -> Self:
        """Return the same form with the named coefficients replaced."""
        ...

    def predict(self, batch: StepStats) -> float:
        """Return the predicted seconds of a batch; 0 for an empty batch. O(1)."""
        ...

    def max_prefill_tokens(
        self, batch: StepStats, context_tokens: int, limit_tokens: int, budget_s: float
    ) -> int:
        """Return the length of the longest prefill chunk that fits a batch within ``budget_s``.

        The chunk belongs to a request with ``context_tokens`` already computed
        and ``limit_tokens`` left. The result n is the largest one up to ``limit_tokens``
        for which ``predict`` with a prefill of n more tokens stays within ``budget_s``; 0 if
        not even one token fits.
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

        Minimizes the squared relative error, because MAPE is what matters; the
        report is on held-out samples, drawn with ``seed``.

        Raises:
            InputFileError: the samples are too few or too alike to determine
                every coefficient; the message says what to measure.
        """
        ...

    def form(self) -> dict[str, object]:
        """Return the form (everything except the coefficients) as a JSON object."""
        ...


def assert_coefficients(model: LatencyModel) -> None:
    """Assert that all coefficients are finite and non-negative."""
    for name, value in model.coefficients.items():
        assert math.isfinite(value) and value >= 0, f"{model.kind}: {name} = {value}"
