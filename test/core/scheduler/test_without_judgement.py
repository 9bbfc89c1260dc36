"""Bounds on offline work once what follows online requests has failed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from core.scheduler.scenarios import MODEL, NO_CACHE, online, queued, ran, snapshot
from sglang_coserve.core.advisory import Advisory
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.slo import parse_slo
from sglang_coserve.core.latency_model.refiner import rescaled
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import Ending, RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.step import StepResult
from sglang_coserve.core.step_stats import StepStats

SMALLEST_S = 1.25 * MODEL.predict(StepStats.of([(32, 0)]))
"""A step of two of the smallest chunks, with the largest reserve of the model."""

SIZE = EngineSize(chunk_tokens=1000, max_requests=8, kv_tokens=1_000_000)


def after_slow_prompts(slo: str) -> tuple[Scheduler, dict[str, str]]:
    """A scheduler whose online requests waited for one another, so that much may be added."""
    off: dict[str, str] = {}
    advisory = Advisory(lambda part, error: off.update({part: str(error)}))
    made = Scheduler(
        make_policy("coserve"),
        MODEL,
        [parse_slo(slo)],
        SchedulerConfig(stream_slowdown=1.0),
        engine=SIZE,
        advisory=advisory,
    )
    for number in range(20):
        one = online(5000, rid=f"a{number}", arrival_s=float(number))
        made.arrived(one.info)
        seen = snapshot(one, now_s=float(number))
        ran(made, made.plan(seen, NO_CACHE), seen)
        made.finish(one.info.rid, Ending.COMPLETE)
    made.interference.advance(MODEL.predict, 100.0)
    return made, off


def offline_s(made: Scheduler) -> float:
    """Seconds of offline work in the next step beside an online decode."""
    seen = snapshot(online(100, RequestState.DECODING, last_token_s=100.0), now_s=100.0)
    plan = made.plan(seen, NO_CACHE)
    return plan.predicted_s - plan.online_part_s


@pytest.mark.parametrize("slo", ["ttft p99 <= +50%", "ttft p99 <= 9s"])
@pytest.mark.parametrize("fails", ["arrived", "advance", "ended"])
def test_offline_work_falls_to_its_smallest_step(
    slo: str, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, off = after_slow_prompts(slo)
    made.add_offline(queued(20_000))
    generous_s = made.interference.allowance.arrival_s
    assert generous_s > 0.1

    def fail(*_args: Any, **_named: Any) -> None:
        raise ZeroDivisionError("its own fault")

    monkeypatch.setattr(made.interference, fails, fail)
    one = online(100, rid="b", arrival_s=100.0)
    made.arrived(one.info)
    seen = snapshot(one, now_s=100.0)
    plan = made.plan(seen, NO_CACHE)
    made.start(plan, ())
    made.update(StepResult(step=plan.step, started_s=100.0, seconds=0.1, batch=plan.batch))
    made.finish("b", Ending.COMPLETE)
    assert set(off) == {"judgement"}
    assert made.interference.decodes_alone == 0
    assert 0 < offline_s(made) <= SMALLEST_S
    assert made.interference.allowance.arrival_s == pytest.approx(SMALLEST_S)


def test_the_smallest_step_follows_what_is_learned_of_the_engine() -> None:
    """Otherwise a step of the offline lane that exceeds the bound would have no bound at all."""
    made, _ = after_slow_prompts("ttft p99 <= +50%")
    made.add_offline(queued(20_000))
    made.interference.stop()
    offline_s(made)
    before_s = made.interference.allowance.arrival_s
    made._learned.model = rescaled(MODEL, np.full(len(MODEL.coefficients), math.log(3.0)))
    offline_s(made)
    assert made.interference.allowance.arrival_s == pytest.approx(3.0 * before_s)


def test_prefixes_stay_protected_however_long_ago_judging_stopped() -> None:
    made, _ = after_slow_prompts("ttft p99 <= +50%")
    made.interference.stop()
    seen = [(made.online_lease_s(now_s), made.protection(now_s)) for now_s in (100.0, 9e9)]
    assert seen[0] == seen[1]
    assert seen[0][0] > 0


def test_what_takes_the_place_of_a_part_is_called_once_and_its_error_reported() -> None:
    reported: list[str] = []
    advisory = Advisory(lambda part, error: reported.append(f"{part}: {error}"))
    calls: list[str] = []
    advisory.without("one", lambda: calls.append("one"))
    advisory.without("two", lambda: 1 // 0)
    for part in ("one", "two", "one"):
        advisory.switch_off(part, KeyError(part))
    assert calls == ["one"]
    assert reported == ["one: 'one'", "two: 'two'", "two: integer division or modulo by zero"]
