"""The state of a step in the executor, and how long it takes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.snapshot import SuspendedStep
from sglang_coserve.core.step import PrefillChunk, ServedRequest, StepPlan, StepResult
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.request import SimRequest


@dataclass(slots=True)
class RunningStep:
    """A step between ``Executor.begin`` and ``Executor.end``, which may be suspended."""

    plan: StepPlan
    started_s: float
    decodes: list[SimRequest]
    online_decodes: list[SimRequest]
    """The online ones of them."""

    retracted: list[SimRequest]
    """Requests that the plan retracted; they wait again."""

    shed: list[SimRequest]
    """Requests that the plan refused."""

    chunks: list[tuple[SimRequest, int]] = field(default_factory=list)
    """Prefill requests, and the tokens that each computes."""

    seconds: float = 0.0
    """Duration without suspensions."""

    opened_pages: int = 0
    """Pages allocated for the KV that it computes."""

    done_share: float = 0.0
    """Share of its layers that is computed, 0 to 1."""

    suspensions: int = 0
    """How often it was suspended and resumed."""

    suspended_s: float = 0.0
    """When it was suspended last."""

    spent_s: float = 0.0
    """Time that it has run, including its resumptions."""

    @property
    def has_offline(self) -> bool:
        """True when an offline request is in it."""
        return len(self.decodes) > len(self.online_decodes) or any(
            not request.info.is_online for request, _ in self.chunks
        )

    @property
    def requests(self) -> list[SimRequest]:
        """Its requests. O(requests)."""
        return [*(request for request, _ in self.chunks), *self.decodes]

    def suspended(self) -> SuspendedStep:
        """Return it as the suspended step of a snapshot."""
        return SuspendedStep(self.plan.step, self.plan.batch, self.done_share, self.suspended_s)

    def result(self, end_s: float) -> StepResult:
        """Return its result, after ``Executor.end``. O(chunks + online requests)."""
        served = [
            ServedRequest(one.info, end_s if one.token_times_s[-1:] == [end_s] else None)
            for one, _ in self.chunks
            if one.info.is_online
        ]
        served += [ServedRequest(request.info, end_s) for request in self.online_decodes]
        return StepResult(
            step=self.plan.step,
            started_s=self.started_s,
            seconds=self.spent_s,
            batch=self.plan.batch,
            chunks=tuple([PrefillChunk(r.info.rid, tokens) for r, tokens in self.chunks]),
            served=tuple(served),
            suspensions=self.suspensions,
        )

    def dropped(self) -> StepResult:
        """Return its result if it is dropped. O(requests)."""
        rids = tuple([request.info.rid for request in self.requests])
        return StepResult(step=self.plan.step, started_s=self.started_s, dropped=rids)

    def tokens_by_class(self) -> tuple[int, int]:
        """Return the tokens computed for online and for offline requests. O(chunks)."""
        online = len(self.online_decodes)
        offline = len(self.decodes) - online
        for request, tokens in self.chunks:
            if request.info.is_online:
                online += tokens
            else:
                offline += tokens
        return online, offline


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
        stats = batch.plan.batch
        for request in ended:
            stats = stats.with_decode(request.computed_tokens)
        seconds = self._model.predict(stats)
        if self._noise_sigma:
            sigma = self._noise_sigma
            seconds *= self._random.lognormvariate(-(sigma**2) / 2, sigma)
        safepoint = self._config.safepoint
        if safepoint and batch.has_offline:
            seconds += safepoint.checks_per_iteration * safepoint.check_s
        return seconds
