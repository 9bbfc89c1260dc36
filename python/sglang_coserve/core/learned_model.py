"""A latency model that follows the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.latency_model import LatencyModel, Refiner, Sample
from sglang_coserve.core.pipeline import pipelined
from sglang_coserve.core.prediction_error import PredictionError

__all__ = ["LearnedModel"]

_REFINED_AT_ONCE: Final = 16
"""Refining costs more than planning, but for many steps little more than for one."""


class LearnedModel:
    """Refined by the steps it is told of; knows how slow the machine has been lately."""

    def __init__(
        self, model: LatencyModel, *, refines: bool, profile_mape: float | None = None
    ) -> None:
        """Start with ``model``, which had this error when it was fitted; keep it unless it
        ``refines``."""
        self._model = model
        self._refiner = Refiner(model) if refines else None
        self._observed: list[Sample] = []
        self._error = PredictionError(profile_mape)

    @property
    def model(self) -> LatencyModel:
        """As refined so far."""
        return self._model

    @property
    def error(self) -> PredictionError:
        """How well it predicted, before it was corrected."""
        return self._error

    def observe(self, sample: Sample, beside: Sequence[BatchStats] = ()) -> None:
        """Learn from a step. O(1), amortized.

        ``beside`` are the batches that shared a pipeline with it, as of ``StepResult``. Where
        one of them is slower, the time says little of this one, and does not refine the model.

        Raises:
            InputFileError: its time is not positive.
        """
        predicted_s, is_slowest = pipelined(self._model.predict, sample.batch, beside)
        self._error.observe(predicted_s, sample.seconds)
        if self._refiner is None or not is_slowest:
            return
        self._observed.append(sample)
        if len(self._observed) == _REFINED_AT_ONCE:
            self._model = self._refiner.refine(*self._observed)
            self._observed.clear()

    def predict_now(self, batch: BatchStats) -> float:
        """Return how long a step takes on the machine as it is now, in seconds."""
        return self._model.predict(batch) * self._error.slowness
