"""HyGen Fig. 5, 8, 9 and 11 to 14: other models, machines and traces, and worse predictors.

Online requests are sampled from the bundled trace, with lognormal lengths that have the mean and
the P99 of the trace that the paper names. Offline ones are of 2,000 + 128 tokens, or as long as
CNN/DailyMail's are on average (See et al.). A pipeline of two stages has two batches in flight.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Final, cast

from paper.experiment import Cell, Findings
from paper.hygen import TESTBED
from paper.hygen_budgets import METRICS, above
from paper.testbed import Lengths, Testbed
from sglang_coserve.core.control.slo import parse_slo
from sglang_coserve.core.latency_model.model import LatencyModel, Sample
from sglang_coserve.core.policies.baselines import OnlineOnlyPolicy, SarathiPolicy
from sglang_coserve.core.policies.hygen import HygenPolicy
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import (
    LatencyReport,
    RequestTimeline,
    latency_report,
    throughput,
)
from sglang_coserve.simulator.binding import TrafficSource, from_trace
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.run import DRAIN_S
from sglang_coserve.workload.shape import fit_to_context, until
from sglang_coserve.workload.trace import TraceRequest, read_trace, sample_path

AZURE: Final = Lengths(1155, 4142, 211, 601)
MOONCAKE: Final = Lengths(12_035, 85_401, 343, 1_120)
ARXIV, CNN = (2000, 128), (781, 56)
CHUNK_TOKENS: Final = 512
"""Of HyGen, and of online requests alone."""

STAR_CHUNKS: Final = (512, 128)
"""Of HyGen*: the same, and one that disturbs less."""

BUDGETS: Final = (0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 3.0, 4.0)
"""Budgets tried, × the mean TBT of online requests alone."""

RATES: Final = (0.05, 0.065, 0.08, 0.1, 0.125, 0.16, 0.2, 0.25, 0.32, 0.4, 0.5, 0.6, 0.75, 0.9)
"""Offline rates that HyGen* tries, × the most that HyGen served."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A machine and a load; the KV is that of one batch in flight."""

    testbed: Testbed
    online: Lengths = AZURE
    offline: tuple[int, int] = ARXIV
    qps: float = 1.0
    """At most 1."""

    context_tokens: int = 4096
    stages: int = 1

    def arrivals(self, begin_s: float, seconds: float) -> list[TraceRequest]:
        """Return the online requests of a part of the trace, in which about one comes a second."""
        rng, lengths = random.Random(begin_s), self.online.draws(1 + round(begin_s))
        trace = until(read_trace(sample_path("online")), begin_s + seconds)
        part = [
            TraceRequest(one.index, one.arrival_s - begin_s, *next(lengths))
            for one in trace
            if rng.random() < self.qps and one.arrival_s >= begin_s
        ]
        return fit_to_context(part, self.context_tokens)[0]


LLAMA: Final = Setting(TESTBED)
SETTINGS: Final = {
    "Fig. 4: Llama-2-7B": ("up to 5.84x", LLAMA),
    # 90% of four devices less 68.8 GB, at 240 KiB a token, for two batches in flight.
    "Fig. 9: Yi-34B on A40, TP=2, PP=2": (
        "up to 1.89x",
        Setting(
            Testbed(model="yi-34b", hardware="a40", tp_size=2, kv_capacity_tokens=211_000),
            qps=0.5,
            stages=2,
        ),
    ),
    # 90% of 40 GB less 14.5 GB, at 128 KiB a token.
    "Fig. 12: Mistral-7B, Mooncake": (
        "higher",
        Setting(
            Testbed(model="mistral-7b", hardware="a100", kv_capacity_tokens=164_000),
            MOONCAKE,
            qps=0.2,
            context_tokens=32_768,
        ),
    ),
    "Fig. 13: Llama-2-7B, CNN/DailyMail": ("higher", replace(LLAMA, offline=CNN)),
}
"""The offline throughput that the paper states, × HyGen*, and where."""


@dataclass
class Lane:
    """A batch in flight, with requests of its own. All advance at the pace of the slowest."""

    model: LatencyModel
    source: TrafficSource
    engine: SimEngine = field(init=False)
    steps: list[Sample] = field(default_factory=list)
    batch: StepStats = field(default_factory=StepStats)
    own_s: float = 0.0
    other_s: float = 0.0

    def predict(self, batch: StepStats) -> float:
        """Return the seconds of a step beside the other batch; all that an executor asks for."""
        self.batch, self.own_s = batch, self.model.predict(batch)
        return max(self.own_s, self.other_s)


def advance(lanes: Sequence[Lane], step: Callable[[SimEngine], bool]) -> None:
    """Step the batch in flight that is behind, until ``step`` returns False for each."""
    going = list(lanes)
    while going:
        lane = min(going, key=lambda one: one.engine.now_s)
        lane.other_s = max((one.own_s for one in going if one is not lane), default=0.0)
        engine = lane.engine
        begin_s, iterations = engine.now_s, engine.counters.iterations
        if not step(engine):
            going.remove(lane)
        if engine.counters.iterations > iterations:
            lane.steps.append(Sample(lane.batch, engine.now_s - begin_s))
        else:
            lane.own_s = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one."""

    tried: float
    """The budget in seconds, or the offline requests a second."""

    online: Sequence[RequestTimeline]
    offline: Sequence[RequestTimeline]
    seconds: float
    steps: Sequence[Sample]

    @property
    def latency(self) -> LatencyReport:
        """Of the online requests."""
        return latency_report(self.online)

    @property
    def offline_per_s(self) -> float:
        """Prompt and output tokens a second."""
        return tokens_per_s(self.offline, 0.0, self.seconds)


def tokens_per_s(timelines: Sequence[RequestTimeline], begin_s: float, end_s: float) -> float:
    """Return prompt and output tokens a second."""
    return throughput(timelines, begin_s, end_s).total_tokens_per_s


def serve(
    setting: Setting,
    part: tuple[float, float],
    policy: Callable[[], Policy],
    tried: float = 0.0,
    believed: LatencyModel | None = None,
) -> Run:
    """Serve a part of the trace, given its begin and its length in seconds.

    ``tried`` is the budget in seconds, for the policy ``sarathi`` the offline requests a second.
    ``believed`` is the scheduler's latency model.
    """
    begin_s, seconds = part
    setup = setting.testbed.with_targets()
    real, is_paced = setup.model, policy().name == SarathiPolicy.name
    scheduler = SchedulerConfig(iteration_budget_s=None if is_paced else tried or None)
    setup = replace(setup, model=believed or real, scheduler=scheduler)
    trace = setting.arrivals(begin_s, seconds)
    lanes = []
    for place in range(setting.stages):
        online = from_trace(trace[place :: setting.stages], RequestClass.ONLINE)
        offline = from_trace(
            (
                TraceRequest(index, index / tried if is_paced else 0.0, *setting.offline)
                for index in count(place, setting.stages)
            ),
            RequestClass.OFFLINE,
        )
        source = TrafficSource([online], offline, 64)
        if is_paced:
            source = TrafficSource([online, offline])
        own, lane = policy(), Lane(real, source)
        setup = replace(
            setup,
            executor=replace(setup.executor, seed=place),
            true_model=cast("LatencyModel", lane),
        )
        lane.engine = setup.make_engine(own, source)
        lanes.append(lane)
    advance(lanes, lambda engine: engine.now_s < seconds and engine.step(seconds))
    for lane in lanes:
        lane.source.close()
    end_s = seconds + DRAIN_S
    advance(lanes, lambda engine: engine.has_online and engine.now_s < end_s and engine.step())
    requests = [one for lane in lanes for one in lane.engine.requests]
    return Run(
        tried,
        [one.timeline() for one in requests if one.info.is_online],
        [one.timeline() for one in requests if not one.info.is_online],
        seconds,
        [step for lane in lanes for step in lane.steps],
    )


@dataclass(frozen=True)
class Tried:
    """Online requests alone, and beside offline ones under rising budgets, or at rising rates."""

    alone: Run
    runs: Sequence[Run]

    @classmethod
    def budgets(
        cls,
        setting: Setting,
        part: tuple[float, float],
        believed: LatencyModel | None = None,
        policy: Callable[[], Policy] = HygenPolicy,
    ) -> Tried:
        """Try HyGen."""
        alone = serve(setting, part, partial(OnlineOnlyPolicy, CHUNK_TOKENS))
        mean_s = alone.latency.itl.mean_s or math.nan
        return cls(alone, [serve(setting, part, policy, x * mean_s, believed) for x in BUDGETS])

    def rates(self, setting: Setting, part: tuple[float, float], chunk_tokens: int) -> Tried:
        """Try HyGen*: Sarathi with both classes, and offline requests at a rate."""
        most = max(run.offline_per_s for run in self.runs) / sum(setting.offline)
        star = partial(SarathiPolicy, chunk_tokens)
        return Tried(self.alone, [serve(setting, part, star, most * x) for x in RATES])

    def best(self, *slos: str) -> Run | None:
        """Return the run with the most offline tokens of those that meet the targets."""
        runs = [run for run in self.runs if all(self.keeps(slo, run) for slo in slos)]
        return max(runs, key=lambda run: run.offline_per_s, default=None)

    def keeps(self, slo: str, run: Run) -> bool:
        """Return whether a run meets a target."""
        return self.above(slo, run) <= 100 * (parse_slo(slo).tolerance or 0.0)

    def above(self, slo: str, run: Run) -> float:
        """Return by how many percent a latency is above that of online requests alone."""
        return above(slo, self.alone.latency, run.latency)


def settings(seconds: float) -> Iterator[Findings]:
    """Fig. 4, 9, 12 and 13: budgets and rates tried beside one part of the trace; the budgets
    that keep a target tried beside the next part."""
    part, next_part = (0.0, seconds), (seconds, seconds)
    for figure, (stated, setting) in SETTINGS.items():
        tried = Tried.budgets(setting, part)
        stars = [tried.rates(setting, part, chunk_tokens) for chunk_tokens in STAR_CHUNKS]
        alone_per_s = tokens_per_s(tried.alone.online, 0.0, seconds)
        other = Tried(serve(setting, next_part, partial(OnlineOnlyPolicy, CHUNK_TOKENS)), ())
        again: dict[float, Run] = {}
        rows: list[tuple[Cell, ...]] = []
        kept, totals, gains = 0, [1.0], [list[float]() for _ in STAR_CHUNKS]
        for slo in (f"{metric} <= +{percent}%" for metric in METRICS for percent in (10, 20, 50)):
            best, paced = tried.best(slo), [star.best(slo) for star in stars]
            paced_per_s = [one.offline_per_s if one else 0.0 for one in paced]
            if best is None:
                rows.append((slo, "none", "-", "-", "-", *paced_per_s))
                continue
            if best.tried not in again:
                again[best.tried] = serve(setting, next_part, HygenPolicy, best.tried)
            over = [tried.above(slo, best), other.above(slo, again[best.tried])]
            kept += other.keeps(slo, again[best.tried])
            totals.append(1 + best.offline_per_s / alone_per_s)
            for found, per_s in zip(gains, paced_per_s, strict=True):
                found += [best.offline_per_s / per_s] if per_s else []
            rows.append((slo, 1e3 * best.tried, *over, best.offline_per_s, *paced_per_s))
        num_met = sum(row[1] != "none" for row in rows)
        most = [f"{min(found):.2f} to {max(found):.2f}x" for found in gains]
        names = [f"HyGen*, chunks of {chunk_tokens}" for chunk_tokens in STAR_CHUNKS]
        yield Findings(
            figure,
            ("target", "budget ms", "+%", "next part: +%", "offline tok/s", *names),
            rows,
            [
                ("targets for which there is a budget", "all", f"{num_met} of {len(rows)}"),
                ("of these, kept beside the next part", "all", f"{kept}"),
                *((f"offline, × {name}", stated, x) for name, x in zip(names, most, strict=True)),
                ("total, × online alone, up to", "3.87x (Fig. 4)", f"{max(totals):.2f}x"),
            ],
        )
