"""Measured steps, as single samples or as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import InputFileError

__all__ = ["Floats", "Ints", "Sample", "SampleTable"]

Ints = NDArray[np.int64]
Floats = NDArray[np.floating]

_COUNTS = StepStats._fields


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
        InputFileError: columns differ in length, a count is negative, a batch
            is empty, or a time is not a positive number. The message names the
            column and the first such row, counted from 0.
    """

    prefill_requests: Ints
    prefill_tokens: Ints
    prefill_context_tokens: Ints
    prefill_attention_pairs: Ints
    decode_requests: Ints
    decode_context_tokens: Ints
    seconds: Floats

    def __post_init__(self) -> None:
        for name in _COUNTS:
            column = getattr(self, name)
            if column.shape != self.seconds.shape:
                raise InputFileError(
                    f"samples: column {name} has shape {column.shape}, "
                    f"seconds has {self.seconds.shape}: give one value per sample"
                )
            _reject_rows(column < 0, f"{name} is negative")
        _reject_rows(self.prefill_requests + self.decode_requests == 0, "the batch is empty")
        valid = np.isfinite(self.seconds) & (self.seconds > 0)
        _reject_rows(~valid, "seconds is not a positive number")

    @classmethod
    def of(cls, samples: Iterable[Sample] | SampleTable) -> SampleTable:
        """Return ``samples`` as columns; a table is returned as it is."""
        if isinstance(samples, SampleTable):
            return samples
        rows = list(samples)
        counts = {
            name: np.array([getattr(row.batch, name) for row in rows], dtype=np.int64)
            for name in _COUNTS
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
