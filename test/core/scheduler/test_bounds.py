"""The reason for the limit on a step's offline work, in its plan and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from core.scheduler.policy_exceptions import HAS_FIXED_BUDGET, all_but
from core.scheduler.scenarios import (
    NO_CACHE,
    TARGETS,
    offline,
    online,
    queued,
    ran,
    scheduler,
    snapshot,
)
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.snapshot import EngineSnapshot, Request, SuspendedStep
from sglang_coserve.core.step import Bound, PromptStop, StepPlan
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.core.work_log import Subject
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.run import BASELINES

DECODING = RequestState.DECODING


SUSPENDED = {
    "stop_share": 0.25,
    "resume_s": 0.001,
    "suspended": SuspendedStep(7, StepStats.of([(1000, 0)]), 0.5, since_s=0.0),
}


def decodes(count: int, prompt_tokens: int = 10) -> list[Request]:
    return [online(prompt_tokens, DECODING) for _ in range(count)]


@dataclass(frozen=True)
class Situation:
    """An engine with these online requests, and more offline work than fits."""

    requests: Sequence[Request]
    policy: str = "coserve"
    targets: SloTargets = TARGETS
    settings: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    def plan(self) -> tuple[Scheduler, EngineSnapshot, StepPlan]:
        brain = scheduler(self.policy, queued(9000), targets=self.targets, **self.settings)
        seen = snapshot(*self.requests, offline(10, DECODING), **self.engine)
        return brain, seen, brain.plan(seen, NO_CACHE)


SITUATIONS = {
    "no target": (
        Situation(decodes(1), targets=SloTargets()),
        Bound.NONE,
        Subject.UNLIMITED,
    ),
    "decodes with a TPOT target": (Situation(decodes(1)), Bound.GAP, Subject.BESIDE_TOKENS),
    "decodes with a pace": (
        Situation(decodes(10), targets=SloTargets(ttft_s=1.0), settings={"stream_slowdown": 1.0}),
        Bound.GAP,
        Subject.BESIDE_TOKENS,
    ),
    "a decode that is due": (
        Situation([online(10, DECODING, last_token_s=-5.0)]),
        Bound.GAP,
        Subject.NONE_BESIDE,
    ),
    "decodes, and arrivals that may not wait": (
        Situation(decodes(1), targets=SloTargets(0.04, 0.1)),
        Bound.ARRIVAL,
        Subject.BESIDE_ARRIVALS,
    ),
    "decodes, and arrivals that may wait for less than a piece of a prompt takes": (
        Situation(decodes(1), targets=SloTargets(0.002, 0.1)),
        Bound.LEAST_PIECE,
        Subject.LEAST_PIECE,
    ),
    "no online request, and arrivals that may wait for less than a step takes": (
        Situation([], targets=SloTargets(0.01)),
        Bound.LEAST_STEP,
        Subject.ALONE,
    ),
    "a decode that is due, before a suspended step": (
        Situation([online(10, DECODING, last_token_s=-0.08)], engine=SUSPENDED),
        Bound.SUSPENDED,
        Subject.SUSPENDED,
    ),
    "a prompt": (Situation([online(50)]), Bound.PROMPTS_WAIT, Subject.BESIDE_WAITING),
    "a prompt that is due": (
        Situation([online(50, arrival_s=-0.92)]),
        Bound.PROMPT,
        Subject.BESIDE_PROMPTS,
    ),
    "a prompt with an own target": (
        Situation([online(50, ttft_s=0.08)]),
        Bound.PROMPT,
        Subject.BESIDE_PROMPTS,
    ),
    "a prompt before decodes": (
        Situation([*decodes(100), online(100)]),
        Bound.PROMPTS_FIRST,
        Subject.PROMPTS_FIRST,
    ),
    "a prompt that is cut": (
        Situation([*decodes(1), online(5000)]),
        Bound.PROMPT_LEFT,
        Subject.PROMPT_LEFT,
    ),
    "more decodes than alone, which hold most KV": (
        Situation(decodes(10, 1200), engine={"free_kv_tokens": 10_000}),
        Bound.KV,
        Subject.CROWDED,
    ),
    "a fixed budget": (
        Situation(decodes(1), settings={"iteration_budget_s": 0.03}),
        Bound.BUDGET,
        Subject.BESIDE_BUDGET,
    ),
    "a fixed budget that is longer than the target": (
        Situation(decodes(1), settings={"iteration_budget_s": 0.3}),
        Bound.GAP,
        Subject.BESIDE_TOKENS,
    ),
    "a fixed budget beside a prompt": (
        Situation([online(50)], settings={"iteration_budget_s": 0.03}),
        Bound.BUDGET,
        Subject.BESIDE_BUDGET,
    ),
    "a fixed budget of HyGen": (
        Situation(decodes(1), policy="hygen", settings={"iteration_budget_s": 0.03}),
        Bound.BUDGET,
        Subject.BESIDE_BUDGET,
    ),
    "decodes with a TPOT target under HyGen": (
        Situation(decodes(1), policy="hygen"),
        Bound.GAP,
        Subject.BESIDE_TOKENS,
    ),
    "decodes with a TPOT target under BROS": (
        Situation(decodes(1), policy="bros"),
        Bound.GAP,
        Subject.BESIDE_TOKENS,
    ),
    "decodes with a TPOT target under OOCO": (
        Situation(decodes(1), policy="ooco"),
        Bound.GAP,
        Subject.BESIDE_TOKENS,
    ),
}


@pytest.mark.parametrize(("situation", "why", "subject"), SITUATIONS.values(), ids=SITUATIONS)
def test_a_plan_says_what_bounds_its_offline_work_and_the_log_says_so_in_words(
    situation: Situation, why: Bound, subject: Subject
) -> None:
    brain, seen, plan = situation.plan()
    assert plan.bound_by is why
    ran(brain, plan, seen)
    subjects = {each["subject"] for each in brain.work.decisions.to_list(1.0)}
    beside = subjects - {"paused", "retracted"}
    assert beside == {subject.name.lower()}


@pytest.mark.parametrize("policy", all_but(BASELINES | HAS_FIXED_BUDGET))
def test_offline_steps_alone_are_bounded_by_their_safepoints(policy: str) -> None:
    brain = scheduler(policy, queued(9000))
    seen = replace(snapshot(), stop_share=0.1)
    assert brain.plan(seen, NO_CACHE).bound_by is Bound.LANE


def test_the_reason_is_that_of_the_shortest_limit() -> None:
    """The prompt is due in 50 ms, the decode in 100, and an arrival may wait for longer."""
    prompt = online(50, arrival_s=-0.95)
    _, _, plan = Situation([prompt]).plan()
    assert (plan.bound_by, plan.budget_s) == (Bound.PROMPT, pytest.approx(0.05))
    fixed = {"iteration_budget_s": 0.04}
    _, _, plan = Situation([prompt], settings=fixed).plan()
    assert (plan.bound_by, plan.budget_s) == (Bound.BUDGET, pytest.approx(0.04))


@pytest.mark.parametrize(
    ("requests", "engine", "stop"),
    [
        ([online(50)], {}, None),
        ([*decodes(1), online(5000)], {}, PromptStop.PACE),
        ([online(5000)], {"max_batch_tokens": 512}, PromptStop.FULL),
        ([*decodes(1, 900), online(500)], {"free_kv_tokens": 100}, PromptStop.MEMORY),
    ],
)
def test_a_plan_says_why_it_has_not_all_online_prompts(
    requests: Sequence[Request], engine: dict[str, Any], stop: PromptStop | None
) -> None:
    brain = scheduler("coserve")
    assert brain.plan(snapshot(*requests, **engine), NO_CACHE).prompt_stop is stop
