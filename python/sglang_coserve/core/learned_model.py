"""A latency model that is corrected by measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sglang_coserve.core.latency_model import LatencyModel, Refiner, Sample
from sglang_coserve.core.pipeline import pipelined
from sglang_coserve.core.prediction_error import PredictionError
from sglang_coserve.core.step_stats import StepStats

__all__ = ["LearnedModel"]

_REFINED_AT_ONCE: Final = 16
"""Samples per refinement. Refining costs more than planning, but hardly more for many samples than
for one."""


class LearnedModel:
    """Refines a latency model by measured steps, and tracks how slow the machine is lately."""

    def __init__(
        self, model: LatencyModel, *, refines: bool, profile_mape: float | None = None
    ) -> None:
        """Start with ``model``, which never changes unless ``refines``.

        ``profile_mape`` is its mean absolute percentage error when it was fitted, as a fraction.
        """
        self._model = model
        self._refiner = Refiner(model) if refines else None
        self._observed: list[Sample] = []
        self._error = PredictionError(profile_mape)

    @property
    def model(self) -> LatencyModel:
        """The latency model, as refined so far."""
        return self._model

    @property
    def error(self) -> PredictionError:
        """The error of the predictions, each made before the model was corrected by that step."""
        return self._error

    def observe(self, sample: Sample, overlapping: Sequence[StepStats] = ()) -> None:
        """Learn from a measured step. Amortized O(1).

        ``overlapping`` are the batches that shared a pipeline with it (see ``StepResult``). If
        one of them is slower, the time says little about this batch and does not refine the model.

        Raises:
            InputFileError: the measured time is not positive.
        """
        predicted_s, is_slowest = pipelined(self._model.predict, sample.batch, overlapping)
        self._error.observe(predicted_s, sample.seconds)
        if self._refiner is None or not is_slowest:
            return
        self._observed.append(sample)
        if len(self._observed) == _REFINED_AT_ONCE:
            self._model = self._refiner.refine(*self._observed)
            self._observed.clear()

    def predict_now(self, batch: StepStats) -> float:
        """Return the seconds of a step, scaled by how slow the machine is at present."""
        return self._model.predict(batch) * self._error.slowness
