"""Plans fail in the real scheduler, and every request has the output that it has without."""

from __future__ import annotations

import random
from operator import attrgetter
from typing import Any

import pytest

from sglang_coserve.core.step import StepResult
from srt import test_scheduler as scenarios
from srt.conftest import Reference
from srt.safepoint import modes, test_suspension
from srt.scripted_engine import MAX_ITERATIONS, EngineProcess, ScriptedEngine, Spec
from srt.test_planned_scheduler import LOOSE, TIGHT

PLACES = {
    "before it": ("admission.core", "plan"),
    "the snapshot": ("ledger", "waiting_requests"),
    "the chunks": ("admission._plans", "_executable"),
    "the queue": ("view", "chunk_size"),
    "the chunk": ("admission._plans", "_choose_chunk"),
    "after it": ("admission.core", "start"),
    "its result": ("admission.core", "update"),
    "an offline arrival": ("admission.core", "add_offline"),
}
"""Where a plan is to fail: the object among ``CoserveParts``, and its method."""

ENDS_PLANNING = {"after it", "its result", "an offline arrival"}
"""SGLang has prepared the batch already, or the core has lost track of what runs."""


def run(
    engine: ScriptedEngine, specs: list[Spec], place: str, share: float
) -> tuple[dict[str, list[int]], int, dict[str, str]]:
    """Serve ``specs``, a few in each step, while this share of the calls fails in that place.

    Returns the outputs, how many plans failed, and what is off.
    """
    parts = engine.scheduler.parts
    path, method = PLACES[place]
    owner, chance = attrgetter(path)(parts), random.Random(7)
    inner = getattr(owner, method)

    def failing(*args: Any, **named: Any) -> Any:
        assert chance.random() > share, "a plan that cannot be"
        return inner(*args, **named)

    requests = [engine.request(*spec) for spec in specs]
    arrivals = {step: requests[3 * step : 3 * step + 3] for step in range(len(specs) // 3 + 1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, failing)
        engine.run(arrivals)
    engine.assert_nothing_leaked()
    unplanned = parts.admission._unplanned
    found = (engine.outputs(specs), unplanned.num_failed, dict(parts.advisory.off))
    unplanned.num_failed = 0
    engine.reqs.clear()
    return found


@pytest.mark.parametrize("targets", [LOOSE, TIGHT], ids=["loose", "tight"])
def test_requests_have_their_outputs_whatever_fails_of_a_plan(
    start_engine: Any, reference_outputs: Reference, targets: Any
) -> None:
    specs = scenarios.mixed_specs(seed=3, num_online=8, num_offline=12)
    expected = reference_outputs(specs)
    process: EngineProcess = start_engine(overlap=targets is TIGHT, coserve=targets)
    for place in PLACES.keys() - ENDS_PLANNING:
        outputs, num_failed, off = process.call(run, specs, place, 0.2)
        assert outputs == expected, place
        assert num_failed > 0, place
        assert off == {}, place
    process.close()


@pytest.mark.parametrize("place", sorted(ENDS_PLANNING | {"before it"}))
def test_where_plans_go_on_failing_requests_are_served_without(
    start_engine: Any, reference_outputs: Reference, place: str
) -> None:
    specs = scenarios.mixed_specs(seed=4, num_online=8, num_offline=12)
    process: EngineProcess = start_engine(coserve=LOOSE)
    share = 1.0 if place == "before it" else 0.1
    outputs, _, off = process.call(run, specs, place, share)
    assert outputs == reference_outputs(specs)
    assert off["planning"] == "AssertionError: a plan that cannot be"
    assert off.keys() <= {"planning", "judgement"}  # That learns from the same results.
    # And on, without any failure.
    outputs, num_failed, _ = process.call(run, specs, place, 0.0)
    assert outputs == reference_outputs(specs)
    assert num_failed == 0
    process.close()


PAUSED: list[Spec] = [(f"off{i}", scenarios.prompt(70 + i, 200), 60, True) for i in range(3)]
"""Beside ``ALONE`` more than the KV pool holds."""
ALONE: Spec = ("on", scenarios.prompt(80, 60), 400, False)


def run_out_of_memory_without_plans(engine: ScriptedEngine) -> tuple[dict[str, list[int]], int]:
    """Plans fail from when an online request decodes beside paused ones until it has ended."""
    from sglang.srt.managers import schedule_policy

    from sglang_coserve.srt.admission import unplanned

    parts = engine.scheduler.parts
    plan, retracted = parts.admission.core.plan, parts.events["retracted"]

    def failing(*args: Any, **named: Any) -> Any:
        online = engine.reqs.get(ALONE[0])
        decodes = online is not None and online.output_ids and not online.finished()
        assert not (decodes and parts.view.paused_requests.paused), "a plan that cannot be"
        return plan(*args, **named)

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            return [engine.request(*spec) for spec in PAUSED]
        if ALONE[0] in engine.reqs:
            raise StopIteration
        is_late = all(len(engine.output(spec[0])) > 5 for spec in PAUSED)
        return [engine.request(*ALONE)] if is_late else []

    with pytest.MonkeyPatch.context() as patch:
        # As with an output of more than 4096 tokens, SGLang does not see that memory will run out.
        patch.setattr(schedule_policy, "CLIP_MAX_NEW_TOKENS", 8)
        patch.setattr(unplanned, "_MOST_IN_A_ROW", MAX_ITERATIONS)
        patch.setattr(parts.admission.core, "plan", failing)
        engine.run(script)
    engine.assert_nothing_leaked()
    assert parts.admission._unplanned.num_failed > 100
    return engine.outputs([ALONE, *PAUSED]), parts.events["retracted"] - retracted


def test_paused_requests_give_way_to_a_single_decode_without_a_plan(
    start_engine: Any, reference_outputs: Reference
) -> None:
    process: EngineProcess = start_engine(coserve=TIGHT)
    outputs, num_retracted = process.call(run_out_of_memory_without_plans)
    assert outputs == reference_outputs([ALONE, *PAUSED])
    assert num_retracted > 0
    process.close()


def run_a_pause_that_fails(engine: ScriptedEngine) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Pause while a step is suspended, and the core fails where it learns that it was dropped."""
    parts = engine.scheduler.parts
    update = parts.admission.core.update

    def failing(result: StepResult) -> None:
        assert not result.dropped, "a drop that cannot be"
        update(result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts.admission.core, "update", failing)
        outputs, times, _ = test_suspension.run_with(engine, test_suspension.pause)
    assert times
    return outputs, dict(parts.advisory.off)


def test_a_pause_that_the_core_cannot_follow_ends_planning_alone(
    start_engine: Any, reference_outputs: Reference
) -> None:
    process = modes.start(start_engine, "overlap-page16-radix")
    outputs, off = process.call(run_a_pause_that_fails)
    assert outputs == reference_outputs(test_suspension.WORK)
    assert off == {"planning": "AssertionError: a drop that cannot be"}
    process.close()
