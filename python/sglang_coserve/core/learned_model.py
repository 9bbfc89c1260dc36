"""A latency model that is corrected by measured steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from sglang_coserve.core.latency_model import LatencyModel, Refiner, Sample
from sglang_coserve.core.prediction_error import PredictionError
from sglang_coserve.core.step_stats import StepStats

__all__ = ["LearnedModel", "pipelined"]

_REFINED_AT_ONCE: Final = 16
"""Samples per refinement. Refining costs more than planning, but hardly more for many samples than
for one."""


def pipelined(
    predict: Callable[[StepStats], float], batch: StepStats, overlapping: Sequence[StepStats]
) -> tuple[float, bool]:
    """Return the seconds of a step in a pipeline, and whether no overlapping batch is slower.

    A pipeline of K stages has K micro-batches in flight, each one stage behind the one before it.
    All advance at the pace of the slowest, so a step takes as long as the slowest of the last K
    would take alone (HyGen keeps the last K steps for the same reason, appendix A).

    Between its start and its tokens K steps begin, including itself. At each start all
    batches advance by one stage, which takes 1/K of the time of the slowest. O(K**2).

    Args:
        predict: Returns the seconds of a batch that passes through all stages alone.
        batch: The batch of the step.
        overlapping: The K - 1 batches before it and the K - 1 after it, in order; empty if K is 1.
    """
    alone_s = predict(batch)
    if not overlapping:
        return alone_s, True
    others_s = [0.0 if other.is_empty else predict(other) for other in overlapping]
    before = len(others_s) // 2
    depth = before + 1
    all_s = [*others_s[:before], alone_s, *others_s[before:]]
    total_s = sum(max(all_s[first : first + depth]) for first in range(depth))
    return total_s / depth, alone_s >= max(others_s)


class LearnedModel:
    """Refines a latency model by measured steps, and tracks how slow the machine is lately."""

    def __init__(
        self, model: LatencyModel, *, refines: bool, profile_mape: float | None = None
    ) -> None:
        """Start with ``model``, which never changes unless ``refines``.

        ``profile_mape`` is its mean absolute percentage error when it was fitted, as a fraction.
        """
        self.model = model
        """The latency model, as refined so far."""

        self._refiner = Refiner(model) if refines else None
        self._observed: list[Sample] = []
        self.error = PredictionError(profile_mape)
        """The error of the predictions, each made before the model was corrected by that step."""

    def observe(self, sample: Sample, overlapping: Sequence[StepStats] = ()) -> None:
        """Learn from a measured step. Amortized O(1).

        ``overlapping`` are the batches that shared a pipeline with it (see ``StepResult``). If
        one of them is slower, the time says little about this batch and does not refine the model.

        Raises:
            InputFileError: the measured time is not positive.
        """
        predicted_s, is_slowest = pipelined(self.model.predict, sample.batch, overlapping)
        self.error.observe(predicted_s, sample.seconds)
        if self._refiner is None or not is_slowest:
            return
        self._observed.append(sample)
        if len(self._observed) == _REFINED_AT_ONCE:
            self.model = self._refiner.refine(*self._observed)
            self._observed.clear()

    def predict_now(self, batch: StepStats) -> float:
        """Return the seconds of a step, scaled by how slow the machine is at present."""
        return self.model.predict(batch) * self.error.slowness
