"""Hashes over all plans of small simulations."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import count
from types import MappingProxyType
from typing import Any, Final

from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import Overload, SchedulerConfig
from sglang_coserve.core.snapshot import EngineSnapshot, PrefixCache
from sglang_coserve.core.step import StepPlan
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.options import SimulationOptions
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.simulator.run import SimulationSetup, Workload, simulate
from sglang_coserve.workload.trace import BLOCK_TOKENS, TraceRequest

INTERVAL_S: Final = 8.0
CHATS: Final = 24


@dataclass(frozen=True)
class Simulation:
    """A policy, its targets and its traffic."""

    policy: str
    flags: Mapping[str, Any]
    """Flags of ``coserve simulate``."""

    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the scheduler that differ from what the flags give."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the policy that differ from their defaults."""

    online_per_s: float = 8.0


# Copies of KV to the host are off, except in one simulation.
_MACHINE: Final = {
    "checkpoint_gb_s": 0.0,
    "kv_capacity_tokens": 120_000,
    "max_running": 96,
    "max_batch_tokens": 4096,
}
_STRICT: Final = {"slo_ttft_ms": 500.0, "slo_tpot_ms": 40.0}
_STATISTICS: Final = {"slo": ["ttft p99 <= 400ms", "tbt p99 <= 30ms"]}
_SMALL_KV: Final = {"kv_capacity_tokens": 30_000, "page_tokens": 1}

SIMULATIONS: Final[Mapping[str, Simulation]] = MappingProxyType(
    {
        "coserve, default": Simulation("coserve", {}),
        "coserve, targets, small KV": Simulation("coserve", {**_STATISTICS, **_SMALL_KV}),
        "coserve, targets, sheds": Simulation(
            "coserve",
            {"slo_ttft_ms": 200.0, "slo_tpot_ms": 20.0},
            {"overload": Overload.SHED},
            online_per_s=60.0,
        ),
        "coserve, learns from noisy steps, overlap": Simulation(
            "coserve", {"overlap": True, "noise": 0.2}, {"refine": True}
        ),
        "coserve, budget, without safepoints": Simulation(
            "coserve",
            {**_STRICT, "safepoint_layers": 0},
            {"iteration_budget_s": 0.025, "max_offline_requests": 40},
            {"utility_ratio": 0.5},
        ),
        "coserve, copies KV": Simulation("coserve", {**_SMALL_KV, "checkpoint_gb_s": 20.0}),
        "conserve, targets": Simulation("conserve", _STRICT),
        "hygen, budget": Simulation(
            "hygen", _STRICT, {"iteration_budget_s": 0.03}, {"step_prefill_tokens": 1024}
        ),
        "bros, targets, small KV": Simulation(
            "bros", {**_STRICT, **_SMALL_KV}, {}, {"base_batch_requests": 32}, 20.0
        ),
        "ooco, targets, small KV": Simulation(
            "ooco", {**_STRICT, **_SMALL_KV}, {}, {"random_picks": 4}, 20.0
        ),
        "fcfs": Simulation("fcfs", _SMALL_KV),
        "non_preemptive": Simulation("non_preemptive", _SMALL_KV),
    }
)

PLAN_FIELDS: Final = (
    *("step", "lane", "resumes", "drops", "until_s", "shed", "retract", "pause", "resume", "park"),
    *("prefills", "skips_decodes", "batch", "predicted_s", "budget_s", "bound_by"),
)
"""The fields of a plan that an engine carries out or an operator sees."""


def plans_of(simulation: Simulation) -> dict[str, object]:
    """Return a hash over the texts of a simulation's plans, and what the plans led to."""
    options = SimulationOptions(policy=simulation.policy, **{**_MACHINE, **simulation.flags})
    setup = options.setup(simulation.policy)
    settings = replace(setup.scheduler, **simulation.scheduler)
    policy = make_policy(simulation.policy, simulation.settings)
    plans = _Plans()
    load = Workload(
        online=lambda: _online(simulation.online_per_s),
        offline=_offline,
        backlog_depth=48,
        interval_s=INTERVAL_S,
    )
    result = simulate(load, _Setup.of(setup, settings, plans), policy)
    counters = result.counters
    return {
        "sha256": plans.digest.hexdigest()[:16],
        "plans": plans.count,
        "online_tokens": counters.online_tokens,
        "offline_tokens": counters.offline_tokens,
        "retractions": counters.retractions,
        "suspensions": counters.suspensions,
    }


def text_of(plan: StepPlan) -> str:
    """Return a plan as a line. Times have nine digits, since machines round differently."""
    return ";".join(f"{name}={_text(getattr(plan, name))}" for name in PLAN_FIELDS)


def _text(value: object) -> str:
    match value:
        case float():
            return f"{value:.9g}"
        case tuple():
            return f"({','.join(map(_text, value))})"
        case _:
            return str(getattr(value, "value", value))


class _Plans:
    """Hashes plans in the order in which they are made."""

    def __init__(self) -> None:
        self.count = 0
        self.digest = hashlib.sha256()

    def add(self, plan: StepPlan) -> None:
        self.count += 1
        self.digest.update(text_of(plan).encode() + b"\n")


@dataclass(frozen=True)
class _Setup(SimulationSetup):
    """A setup that reports the plans of its schedulers."""

    plans: _Plans = field(default_factory=_Plans)

    @classmethod
    def of(cls, setup: SimulationSetup, settings: SchedulerConfig, plans: _Plans) -> _Setup:
        values = {each.name: getattr(setup, each.name) for each in fields(SimulationSetup)}
        return cls(**{**values, "scheduler": settings}, plans=plans)

    def make_scheduler(self, policy: Policy) -> Scheduler:
        scheduler = super().make_scheduler(policy)
        plan = scheduler.plan

        def reported(snapshot: EngineSnapshot, cache: PrefixCache) -> StepPlan:
            made = plan(snapshot, cache)
            self.plans.add(made)
            return made

        scheduler.plan = reported  # type: ignore[method-assign]
        return scheduler


def _online(per_s: float) -> Iterable[SimRequest]:
    """Yield turns of conversations and requests without a history, in bursts."""
    rng = random.Random(1)
    turns = [0] * CHATS

    def requests() -> Iterator[TraceRequest]:
        at_s = 0.0
        for index in range(int(per_s * INTERVAL_S)):
            # Every second half second is five times as busy.
            busy = 5.0 if int(at_s * 2) % 2 else 1.0
            at_s += rng.expovariate(per_s * busy / 3)
            output_tokens = rng.randint(8, 200)
            if rng.random() < 0.4:
                chat = rng.randrange(CHATS)
                turns[chat] += 1
                blocks = tuple(1000 * chat + place for place in range(1 + turns[chat]))
                prompt_tokens = BLOCK_TOKENS * len(blocks) + rng.randint(1, BLOCK_TOKENS)
                yield TraceRequest(index, at_s, prompt_tokens, output_tokens, blocks)
            else:
                yield TraceRequest(index, at_s, rng.randint(16, 3000), output_tokens)

    return from_trace(list(requests()), RequestClass.ONLINE, seed=0)


def _offline() -> Iterable[SimRequest]:
    """Yield requests of many lengths without an end; half of the requests share documents."""
    rng = random.Random(2)

    def requests() -> Iterator[TraceRequest]:
        for index in count():
            output_tokens = rng.randint(1, 300)
            if rng.random() < 0.5:
                document = 1_000_000 + 10 * rng.randrange(12)
                blocks = tuple(range(document, document + 2))
                prompt_tokens = 2 * BLOCK_TOKENS + rng.randint(1, 400)
                yield TraceRequest(index, 0.0, prompt_tokens, output_tokens, blocks)
            else:
                yield TraceRequest(index, 0.0, rng.randint(16, 6000), output_tokens)

    return from_trace(requests(), RequestClass.OFFLINE, seed=0)
