"""How long a modelled step takes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.running_step import RunningStep

__all__ = ["StepDuration"]


class StepDuration:
    """The latency model's prediction, with noise and the costs around the forward pass."""

    def __init__(self, config: ExecutorConfig, model: LatencyModel) -> None:
        self._config = config
        self._model = model
        self._random = random.Random(config.seed)
        # Parameter of a lognormal distribution with mean 1.
        self._noise_sigma = math.sqrt(math.log1p(config.noise_cv**2))

    def seconds(self, batch: RunningStep, ended: Iterable[SimRequest]) -> float:
        """Return the seconds of a step, in which the ``ended`` requests decode to no purpose."""
        stats = batch.stats
        for request in ended:
            stats = stats.with_decode(request.computed_tokens)
        seconds = self._model.predict(stats)
        if self._noise_sigma:
            sigma = self._noise_sigma
            seconds *= self._random.lognormvariate(-(sigma**2) / 2, sigma)
        config = self._config
        if not config.overlap:
            seconds += config.scheduling_s
        safepoint = config.safepoint
        if safepoint and batch.has_offline:
            seconds += safepoint.checks_per_iteration * safepoint.check_s
        return seconds
