"""What latency models have in common: samples, the interface, a fit and its report, chunks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Annotated, Any, Final, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_coserve.core.ranges import NOT_NEGATIVE, check_ranges
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import InputFileError

_HELD_OUT_FRACTION: Final = 0.2

_SECOND_TRY_TOKENS: Final = 1024
"""Of the search for the longest chunk: about as long as chunks are."""

Ints = NDArray[np.int64]
Floats = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step: its batch and its duration."""

    batch: StepStats
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """Many measured steps as columns of shape (n,), for vectorised fits.

    The columns before ``seconds`` are the fields of ``StepStats``.

    Raises:
        InputFileError: a batch is empty, or a time is not a positive number. The message names the
            first such row, counted from 0.
    """

    prefill_requests: Ints
    prefill_tokens: Ints
    prefill_context_tokens: Ints
    prefill_attention_pairs: Ints
    decode_requests: Ints
    decode_context_tokens: Ints
    seconds: Floats

    def __post_init__(self) -> None:
        _reject_rows(self.prefill_requests + self.decode_requests == 0, "the batch is empty")
        valid = np.isfinite(self.seconds) & (self.seconds > 0)
        _reject_rows(~valid, "seconds is not a positive number")

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> SampleTable:
        """Return ``samples`` as columns."""
        rows = list(samples)
        counts = {
            name: np.array([getattr(row.batch, name) for row in rows], dtype=np.int64)
            for name in StepStats._fields
        }
        return cls(**counts, seconds=np.array([row.seconds for row in rows], dtype=np.float64))

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, rows: Ints) -> SampleTable:
        """Return the rows with these indices, in this order."""
        return SampleTable(
            **{field.name: getattr(self, field.name)[rows] for field in fields(self)}
        )

    @property
    def num_requests(self) -> Ints:
        """Number of requests of each batch."""
        return self.prefill_requests + self.decode_requests

    @property
    def compute_tokens(self) -> Ints:
        """ConServe's ΣP of each batch."""
        return self.prefill_tokens + self.decode_requests


def _reject_rows(wrong: NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        raise InputFileError(f"samples: {what} in sample {int(wrong.argmax())}: leave it out")


M_co = TypeVar("M_co", covariant=True)


@dataclass(frozen=True, slots=True)
class FitReport:
    """The error of a fitted model on samples that the fit did not see.

    Errors are relative to the measured time and are fractions: 0.02 is 2%.

    Raises:
        ConfigError: on construction, when a figure is out of range; the message names it.
    """

    fitted_samples: Annotated[int, NOT_NEGATIVE]
    """Number of samples that the coefficients were fitted on."""

    held_out_samples: Annotated[int, NOT_NEGATIVE]
    """Number of samples that the errors below were measured on."""

    mape: Annotated[float, NOT_NEGATIVE]
    """Mean absolute percentage error, as a fraction."""

    p99_ape: Annotated[float, NOT_NEGATIVE]
    """99th percentile of the absolute relative error."""

    bias: float
    """Mean of (predicted − measured) / measured; positive when the model overestimates."""

    seed: int
    """Seed of the split into fitted and held-out samples."""

    def __post_init__(self) -> None:
        check_ranges(self, "fit_report: {}".format)

    @classmethod
    def measure(
        cls, predicted: Floats, measured: Floats, *, fitted_samples: int, seed: int
    ) -> FitReport:
        """Compare predictions with measurements, both in seconds and of shape (n,)."""
        error = predicted / measured - 1.0
        return cls(
            fitted_samples=fitted_samples,
            held_out_samples=len(measured),
            mape=float(np.abs(error).mean()),
            p99_ape=float(np.quantile(np.abs(error), 0.99)),
            bias=float(error.mean()),
            seed=seed,
        )

    def __str__(self) -> str:
        return (
            f"MAPE {self.mape:.2%}, P99 {self.p99_ape:.2%}, bias {self.bias:+.2%} "
            f"on {self.held_out_samples} held-out samples ({self.fitted_samples} fitted)"
        )


@dataclass(frozen=True, slots=True)
class Fit(Generic[M_co]):
    """A fitted model and its error on held-out samples."""

    model: M_co
    report: FitReport


class LatencyModel(ABC):
    """Predicts the duration of a step from sums over the requests of its batch.

    Implementations are frozen dataclasses. The *coefficients* are seconds per unit of some
    work, finite and never negative; so a prediction is never negative and never shrinks when a
    batch grows, however far from the measured batches. All other fields are the *form*, which a
    fit does not change. A model to be fitted is created with coefficients of zero.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def kind(self) -> str:
        """The name of the model in a saved profile."""

    coefficients: Mapping[str, float]
    """By name, in the order of ``contributions``."""

    def with_coefficients(self, values: Mapping[str, float]) -> Self:
        """Return the same form with the named coefficients replaced."""
        form: Any = self
        changed: Self = replace(form, coefficients={**self.coefficients, **values})
        return changed

    @abstractmethod
    def form(self) -> dict[str, object]:
        """Return the form (everything except the coefficients) as a JSON object."""

    @abstractmethod
    def predict(self, batch: StepStats) -> float:
        """Return the predicted seconds of a batch; 0 for an empty batch. O(1)."""

    def max_prefill_tokens(
        self, batch: StepStats, context_tokens: int, limit_tokens: int, budget_s: float
    ) -> int:
        """Return the length of the longest prefill chunk that fits a batch within ``budget_s``.

        The chunk belongs to a request with ``context_tokens`` already computed
        and ``limit_tokens`` left. The result n is the largest one up to ``limit_tokens``
        for which ``predict`` with a prefill of n more tokens stays within ``budget_s``; 0 if
        not even one token fits.

        Tries where the line through the last two tries meets the budget, as models are nearly
        linear in pieces: six predictions mostly. Every eighth halves what is left, so it takes
        O(log limit) of them for any monotone ``predict``.
        """
        low, high = 0, limit_tokens + 1  # low fits, high does not
        probe, last, last_s = 1, 0, 0.0
        for number in count(1):
            if high - low <= 1:
                break
            seconds = self.predict(batch.with_prefill(probe, context_tokens))
            if seconds <= budget_s:
                low, ahead = probe, 1.0
            else:
                high, ahead = probe, -1.0
            if number == 1:
                ahead = _SECOND_TRY_TOKENS
            elif seconds != last_s:
                ahead = (budget_s - seconds) * (probe - last) / (seconds - last_s)
            last, last_s = probe, seconds
            if number % 8:
                probe = math.floor(min(max(probe + ahead, low + 1), high - 1))
            else:
                probe = (low + high) // 2
        return low

    @abstractmethod
    def contributions(self, table: SampleTable) -> Floats:
        """Return the seconds that each coefficient adds to each batch.

        The shape is (n, number of coefficients); a row sums to ``predict`` of
        its batch. ``table.seconds`` is not used.
        """

    @abstractmethod
    def fitted(self, table: SampleTable) -> Self:
        """Return a new model of the same form with the least squared relative error, because MAPE
        is what matters.

        Raises:
            InputFileError: the samples are too few or too alike to determine
                every coefficient; the message says what to measure.
        """

    def fit(self, table: SampleTable, *, seed: int = 0) -> Fit[Self]:
        """Fit on four fifths of the samples, drawn with ``seed``, and report on the rest.

        Raises:
            InputFileError: there are fewer than two samples, or ``fitted`` raises it.
        """
        if len(table) < 2:
            raise InputFileError(
                f"samples: {len(table)} given, a fit and its report need at least 2: measure more"
            )
        order = np.random.default_rng(seed).permutation(len(table))
        num_held_out = max(1, round(_HELD_OUT_FRACTION * len(table)))
        held_out = table.take(order[:num_held_out])
        model = self.fitted(table.take(order[num_held_out:]))
        report = FitReport.measure(
            model.contributions(held_out).sum(axis=1),
            held_out.seconds,
            fitted_samples=len(table) - num_held_out,
            seed=seed,
        )
        return Fit(model, report)

    def assert_coefficients(self) -> None:
        """Assert that all coefficients are finite and non-negative."""
        for name, value in self.coefficients.items():
            assert math.isfinite(value) and value >= 0, f"{self.kind}: {name} = {value}"
