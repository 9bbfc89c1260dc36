"""Runs one simulation: a workload on a machine under a policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sglang_coserve.core.control.slo import Slo, deadlines
from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import Overload, SchedulerConfig
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.binding import TrafficSource
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.observer import SimulationObserver
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.result import SimulationResult

BASELINES: Final = frozenset({"fcfs", "non_preemptive", "online_only", "priority", "sarathi"})
"""Policies that model systems without safepoints and checkpoints; none looks at latencies."""

_PROGRESS_ITERATIONS = 256

DRAIN_S: Final = 300.0
"""Longest time after the interval for online requests that arrived in it to end. Offline work goes
on meanwhile but is no longer counted."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run, as functions that create them anew for every run."""

    online: Callable[[], Iterable[SimRequest]] = tuple
    """Online requests in order of arrival."""

    offline: Callable[[], Iterable[SimRequest]] = tuple
    """Offline requests in order of arrival; with a ``backlog_depth`` in the order to feed them."""

    backlog_depth: int = 0
    """0: offline requests come at their arrival times. Otherwise the queue is kept filled
    with this many, so that offline work never runs out while there are requests."""

    interval_s: float = math.inf
    """End of the measurement; infinite to run until everything is served."""


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """The machine and the scheduler's settings, shared by all policies that are compared."""

    model: LatencyModel
    """The scheduler's latency model."""

    executor: ExecutorConfig
    targets: SloTargets = field(default_factory=SloTargets)
    slos: tuple[Slo, ...] = ()
    """SLOs that limit offline work; if empty, ``targets`` converted by ``deadlines``."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    true_model: LatencyModel | None = None
    """The model of the real step times; None for the scheduler's."""

    def make_scheduler(self, policy: Policy) -> Scheduler:
        """Return a new scheduler; its baseline is SGLang on this machine."""
        engine = self.executor.engine_size
        slos = self.slos or deadlines(self.targets)
        return Scheduler(policy, self.model, slos, self.scheduler, engine=engine)

    def make_engine(
        self,
        policy: Policy,
        source: TrafficSource,
        observers: Sequence[SimulationObserver] = (),
        take_back: Callable[[SimRequest], None] | None = None,
    ) -> SimEngine:
        """Return a new engine with its scheduler; for the arguments see ``SimEngine``."""
        return SimEngine(
            self.make_scheduler(policy),
            SimulatedExecutor(self.executor, self.true_model or self.model),
            source,
            observers,
            take_back,
            follows_latencies=self.follows_latencies(policy),
        )

    def follows_latencies(self, policy: Policy) -> bool:
        """Return whether plans may depend on what online requests got, and would have got alone.

        Otherwise the scheduler need not know of them, which is a quarter of a run's time.
        """
        return (
            policy.name not in BASELINES
            or self.executor.safepoint is not None
            or self.scheduler.overload is Overload.SHED
        )


def simulate(
    workload: Workload,
    setup: SimulationSetup,
    policy: Policy,
    *,
    observers: Sequence[SimulationObserver] = (),
    on_progress: Callable[[float], bool] | None = None,
) -> SimulationResult:
    """Run a workload under one policy.

    ``policy`` is a new one, because policies keep state. ``on_progress`` is called regularly with
    the simulated time; if it returns True, the run ends, and the result covers the time so far.
    """
    is_backlog = workload.backlog_depth > 0
    source = TrafficSource(
        timed=[workload.online()] if is_backlog else [workload.online(), workload.offline()],
        backlog=workload.offline() if is_backlog else (),
        backlog_depth=workload.backlog_depth,
    )
    engine = setup.make_engine(policy, source, observers)
    interval_s = workload.interval_s
    is_complete = True
    while engine.step(interval_s):
        if engine.counters.iterations % _PROGRESS_ITERATIONS == 0 and on_progress:
            is_complete = not on_progress(engine.now_s)
        if not is_complete or engine.now_s >= interval_s:
            break
    if is_complete:
        source.close()
        while engine.has_online and engine.now_s < interval_s + DRAIN_S and engine.step():
            pass
    else:
        interval_s = engine.now_s
    requests = engine.requests
    return SimulationResult(
        policy=policy.name,
        targets=setup.targets,
        interval_s=interval_s if math.isfinite(interval_s) else max(engine.now_s, 1e-9),
        end_s=engine.now_s,
        is_complete=is_complete,
        online=tuple(r.timeline() for r in requests if r.info.is_online),
        offline=tuple(r.timeline() for r in requests if not r.info.is_online),
        counters=engine.counters,
        recomputed_tokens=sum(r.recomputed_tokens for r in requests),
        reloaded_tokens=sum(r.reloaded_tokens for r in requests),
        kv_capacity_tokens=setup.executor.kv_capacity_tokens,
    )
