"""Fits a model on some samples and reports its error on the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt

from sglang_coserve.core.latency_model.samples import Floats, Sample, SampleTable
from sglang_coserve.errors import InputFileError

__all__ = ["Fit", "FitReport", "fit_and_report"]

_HELD_OUT_FRACTION: Final = 0.2


class _Fitted(Protocol):
    """What a report needs of a ``LatencyModel``."""

    def contributions(self, table: SampleTable) -> Floats: ...


M = TypeVar("M", bound=_Fitted)
M_co = TypeVar("M_co", covariant=True)


@dataclass(frozen=True, slots=True)
class FitReport:
    """The error of a fitted model on samples that the fit did not see.

    Errors are relative to the measured time and are fractions: 0.02 is 2%.
    """

    fitted_samples: NonNegativeInt
    """Number of samples that the coefficients were fitted on."""

    held_out_samples: NonNegativeInt
    """Number of samples that the errors below were measured on."""

    mape: NonNegativeFloat
    """Mean absolute percentage error, as a fraction."""

    p99_ape: NonNegativeFloat
    """99th percentile of the absolute relative error."""

    bias: float
    """Mean of (predicted − measured) / measured; positive when the model overestimates."""

    seed: int
    """Seed of the split into fitted and held-out samples."""

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


def fit_and_report(
    fit: Callable[[SampleTable], M], samples: Iterable[Sample] | SampleTable, seed: int
) -> Fit[M]:
    """Fit on a random four fifths of the samples and report on the rest.

    Raises:
        InputFileError: there are fewer than two samples, or ``fit`` raises it.
    """
    table = SampleTable.of(samples)
    if len(table) < 2:
        raise InputFileError(
            f"samples: {len(table)} given, a fit and its report need at least 2: measure more"
        )
    order = np.random.default_rng(seed).permutation(len(table))
    num_held_out = max(1, round(_HELD_OUT_FRACTION * len(table)))
    held_out = table.take(order[:num_held_out])
    model = fit(table.take(order[num_held_out:]))
    report = FitReport.measure(
        model.contributions(held_out).sum(axis=1),
        held_out.seconds,
        fitted_samples=len(table) - num_held_out,
        seed=seed,
    )
    return Fit(model, report)
