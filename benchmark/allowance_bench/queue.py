"""One server, online prompts in order of arrival, and offline work that fills what it may."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import numpy as np

from sglang_coserve.core.control.allowance import Allowance
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.interference import Interference
from sglang_coserve.core.control.pipeline_baseline import baseline_of
from sglang_coserve.core.control.slo import Latency, Slo, Statistic
from sglang_coserve.core.control.slo_monitor import SloMonitor
from sglang_coserve.core.latency_model import CONSERVE, LinearModel
from sglang_coserve.core.prediction_error import PredictionError
from sglang_coserve.core.request import Ending, RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import SloTargets

__all__ = ["QueueOutcome", "QueueSetting", "run"]

MODEL = LinearModel.of(CONSERVE, compute_token_s=24e-6, iteration_s=4e-3)
_MEAN_PROMPT_TOKENS = 1000
_SIGMA = 0.6
_SLOW_FACTOR, _SLOW_S, _SLOW_EVERY_S = 1.5, 2.0, 30.0


@dataclass(frozen=True)
class QueueSetting:
    """A load, a target and a machine."""

    load: float
    """Part of the time that online prompts one by one would take."""

    scale: float
    """Of the P99 TTFT alone, the target."""

    noise: float
    """Standard deviation of the logarithm of a step's time."""

    has_slow_spells: bool = False
    """Steps take half as long again for 2 s every 30 s, on average."""

    seed: int = 0
    requests: int = 4000


@dataclass(frozen=True)
class QueueOutcome:
    """What came of the requests after the first quarter."""

    target_s: float
    alone_p99_s: float
    p99_s: float
    late: float
    """Share beyond the target."""

    harmed: float
    """Share beyond the target that was within it in a run of the same requests on the same
    machine without offline work."""

    offline: float
    """Share of the time that offline work got."""


class _Machine:
    """How long steps really take. Slow spells come at the same times, whatever runs."""

    def __init__(self, setting: QueueSetting) -> None:
        self._random = random.Random(setting.seed + 1)
        self._spells = random.Random(setting.seed + 2)
        self._noise = setting.noise
        self._next_s = self._spells.expovariate(1 / _SLOW_EVERY_S)
        self._has_spells = setting.has_slow_spells
        self._slow_until_s = 0.0

    def slowness(self, now_s: float) -> float:
        if now_s >= self._next_s:
            self._slow_until_s = now_s + _SLOW_S
            self._next_s = self._slow_until_s + self._spells.expovariate(1 / _SLOW_EVERY_S)
        return _SLOW_FACTOR if self._has_spells and now_s < self._slow_until_s else 1.0

    def noise(self) -> float:
        return self._random.lognormvariate(0.0, self._noise)


def arrivals(setting: QueueSetting) -> list[tuple[float, int]]:
    """Return arrival and prompt tokens of each request."""
    rng = random.Random(setting.seed)
    mean_s = MODEL.predict(StepStats.of([(_MEAN_PROMPT_TOKENS, 0)]))
    now_s, found = 0.0, []
    for _ in range(setting.requests):
        now_s += rng.expovariate(setting.load / mean_s)
        tokens = _MEAN_PROMPT_TOKENS * rng.lognormvariate(-(_SIGMA**2) / 2, _SIGMA)
        found.append((now_s, max(1, int(tokens))))
    return found


def run(setting: QueueSetting) -> QueueOutcome:
    """Serve online prompts of one output token with offline work beside them."""
    requests = arrivals(setting)
    alone_s = _alone(requests, setting)
    alone_p99_s = float(np.quantile(alone_s, 0.99))
    target_s = setting.scale * alone_p99_s
    allowance = Allowance(
        [Slo(Latency.TTFT, Statistic.P99, limit_s=target_s)], ttft_prior_s=1.0, gap_prior_s=1.0
    )
    monitor = SloMonitor(SloTargets(target_s))
    interference = Interference(monitor, baseline_of(EngineSize(1 << 20)), allowance)
    machine = _Machine(setting)
    now_s, offline_s, place = 0.0, 0.0, 0
    ttfts_s: list[float] = []
    error = PredictionError()
    while place < len(requests):
        served = []
        while place < len(requests) and requests[place][0] <= now_s:
            arrival_s, tokens = requests[place]
            rid = str(place)
            info = RequestInfo(rid, RequestClass.ONLINE, tokens, 1, arrival_s)
            interference.arrived(info)
            served.append((rid, arrival_s, tokens))
            place += 1
        online_s = MODEL.predict(StepStats.of([(n, 0) for _, _, n in served])) if served else 0.0
        planned_s = max(online_s, allowance.arrival_s)
        for _, arrival_s, _ in served:
            slack_s = 0.95 * (arrival_s + target_s - now_s)
            planned_s = max(min(planned_s, slack_s), online_s)
        slowness = machine.slowness(now_s)
        took = slowness * machine.noise()
        seconds = planned_s * took
        error.observe(planned_s, seconds)
        offline_s += seconds - max(online_s, MODEL.coefficients["iteration_s"]) * took
        now_s += seconds
        for rid, arrival_s, _ in served:
            interference.produced(rid, now_s)
            interference.ended(rid, Ending.COMPLETE)
            ttfts_s.append(now_s - arrival_s)
        slowness = error.slowness
        interference.advance(partial(_predict, slowness), now_s)
    skipped = len(ttfts_s) // 4
    ttft, own = np.array(ttfts_s[skipped:]), np.array(alone_s[skipped:])
    late = ttft > target_s
    return QueueOutcome(
        target_s,
        alone_p99_s,
        float(np.quantile(ttft, 0.99)),
        float(late.mean()),
        float((late & (own <= target_s)).mean()),
        offline_s / now_s,
    )


def _predict(slowness: float, batch: StepStats) -> float:
    return MODEL.predict(batch) * slowness


def _alone(requests: list[tuple[float, int]], setting: QueueSetting) -> list[float]:
    """Return the TTFT of each request on this machine without offline work."""
    machine = _Machine(setting)
    now_s, place = 0.0, 0
    ttfts_s: list[float] = []
    while place < len(requests):
        now_s = max(now_s, requests[place][0])
        first = place
        while place < len(requests) and requests[place][0] <= now_s:
            place += 1
        batch = requests[first:place]
        seconds = MODEL.predict(StepStats.of([(tokens, 0) for _, tokens in batch]))
        now_s += seconds * machine.slowness(now_s) * machine.noise()
        ttfts_s += [now_s - arrival_s for arrival_s, _ in batch]
    return ttfts_s
