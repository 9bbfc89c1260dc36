"""Planning fails in the real scheduler, and every request has the output that it has without."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_coserve.core.step import StepResult
from sglang_coserve.srt.admission.fail_safe import OFFLINE_WORK
from srt import test_scheduler as scenarios
from srt.conftest import Reference
from srt.safepoint import modes, test_suspension
from srt.safepoint.random_suspensions import suspensions_of
from srt.scripted_engine import MAX_ITERATIONS, EngineProcess, ScriptedEngine, Spec
from srt.test_planned_scheduler import LOOSE, TIGHT

PLACES = {
    "before it": ("admission.core", "plan"),
    "the snapshot": ("snapshots", "take"),
    "the chunks": ("admission._plans", "_executable"),
    "the queue": ("queues", "chunk_size"),
    "the chunk": ("admission._plans", "_choose_chunk"),
    "after it": ("admission.core", "start"),
    "its result": ("admission.core", "update"),
    "an offline arrival": ("admission.core", "add_offline"),
}
"""Where a plan is to fail: the object among ``CoserveParts``, and its method."""

STOPS = {"after it", "its result", "an offline arrival"}
"""The core has lost track of the engine: a single failure stops offline work."""

HARMLESS = sorted(PLACES.keys() - STOPS)

Outcome = tuple[dict[str, list[int]], int, dict[str, str]]
"""Outputs by rid, the number of failed plans, and the parts that are off."""


def run(
    engine: ScriptedEngine,
    specs: list[Spec],
    place: str,
    fails: Callable[[int], bool],
    suspends: float = 0.0,
) -> Outcome:
    """Serve ``specs``, a few in each step, while calls in that place fail.

    Args:
        engine: Where.
        specs: The requests. Offline ones that still wait at the end are aborted.
        place: One of ``PLACES``.
        fails: Whether the call with this number fails.
        suspends: Share of the steps of the offline lane that are suspended, at random layers.
    """
    parts = engine.scheduler.parts
    path, method = PLACES[place]
    # Of its class, since another object may take its place.
    owner, calls = type(attrgetter(path)(parts)), 0
    inner = getattr(owner, method)
    failed_before = parts.admission.state()["plans_failed"]

    def failing(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        assert not fails(calls), "a plan that cannot be"
        return inner(*args, **named)

    requests = [engine.request(*spec) for spec in specs]
    arrivals = {step: requests[3 * step : 3 * step + 3] for step in range(len(specs) // 3 + 1)}
    stopping = suspensions_of(engine).stopping(7, suspends) if suspends else nullcontext()
    with pytest.MonkeyPatch.context() as patch, stopping:
        patch.setattr(owner, method, failing)
        engine.run(arrivals)
    waiting = [rid for rid, *_ in specs if not engine.reqs[rid].finished()]
    found = engine.outputs(specs)
    engine.run([engine.abort(rid) for rid in waiting])
    engine.assert_nothing_leaked()
    num_failed = parts.admission.state()["plans_failed"] - failed_before
    engine.reqs.clear()
    return found, num_failed, dict(parts.advisory.off)


class Share:
    """This share of the calls fails."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._chance = random.Random(7)

    def __call__(self, _: int) -> bool:
        return self._chance.random() < self._share


@pytest.mark.parametrize("targets", [LOOSE, TIGHT], ids=["loose", "tight"])
def test_requests_have_their_outputs_whatever_fails_of_a_plan(
    start_engine: Any, reference_outputs: Reference, targets: Any
) -> None:
    specs = scenarios.mixed_specs(seed=3, num_online=8, num_offline=12)
    expected = reference_outputs(specs)
    process: EngineProcess = start_engine(overlap=targets is TIGHT, coserve=targets)
    for place in HARMLESS:
        outputs, num_failed, off = process.call(run, specs, place, Share(0.2))
        assert outputs == expected, place
        assert num_failed > 0, place
        assert off == {}, place
    process.close()


class Calls:
    """The calls with these numbers fail, but never eight in a row."""

    def __init__(self, numbers: set[int]) -> None:
        self._numbers = numbers

    def __call__(self, number: int) -> bool:
        return number in self._numbers and number % 8 != 0


@pytest.mark.parametrize("mode", modes.QUICK)
@settings(max_examples=12)
@given(
    place=st.sampled_from(HARMLESS),
    numbers=st.sets(st.integers(1, 100), max_size=60),
    suspends=st.sampled_from([0.0, 0.3, 0.8]),
    seed=st.integers(0, 3),
)
def test_plans_that_fail_at_any_step_change_no_output(
    start_engine: Any,
    reference_outputs: Reference,
    mode: str,
    place: str,
    numbers: set[int],
    suspends: float,
    seed: int,
) -> None:
    """Also while a step is suspended, or requests are paused or parked."""
    specs = scenarios.mixed_specs(seed=20 + seed, num_online=6, num_offline=9)
    process = modes.start(start_engine, mode)
    outputs, _, off = process.call(run, specs, place, Calls(numbers), suspends)
    assert off == {}
    assert outputs == reference_outputs(specs)


@pytest.mark.parametrize("suspends", [0.0, 0.5], ids=["", "suspending"])
@pytest.mark.parametrize("place", sorted(STOPS | {"before it"}))
def test_where_plans_go_on_failing_offline_work_stops_and_online_requests_are_served(
    start_engine: Any, reference_outputs: Reference, place: str, suspends: float
) -> None:
    specs = scenarios.mixed_specs(seed=4, num_online=8, num_offline=12)
    expected = reference_outputs(specs)
    process = modes.start(start_engine, "overlap-page16-radix")
    share = Share(1.0 if place == "before it" else 0.1)
    for fails in (share, Share(0.0)):  # And on, without any failure.
        outputs, num_failed, off = process.call(run, specs, place, fails, suspends)
        assert off[OFFLINE_WORK] == "AssertionError: a plan that cannot be"
        assert off.keys() <= {OFFLINE_WORK, "judgement"}  # That learns from the same results.
        for rid, *_, is_offline in specs:
            if is_offline:
                assert outputs[rid] == expected[rid][: len(outputs[rid])], rid
            else:
                assert outputs[rid] == expected[rid], rid
    assert num_failed == 0
    assert not any(outputs[rid] for rid, *_, is_offline in specs if is_offline)
    process.close()


def run_stopped(engine: ScriptedEngine) -> tuple[dict[str, Any], list[Any], bool, list[int]]:
    """Let offline work stop while a request runs.

    Returns the offline part of the status, the answer to a heartbeat, True if the engine is idle
    and holds no KV, and of online requests that come then: how many were judged, and how many are
    still known.
    """
    from sglang.srt.managers.io_struct import GetInternalStateReq

    scheduler, parts = engine.scheduler, engine.scheduler.parts
    interference = parts.admission.core.interference

    def failing(*_: Any) -> None:
        raise ValueError("no plan")

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            return [engine.request("off", scenarios.prompt(1, 300), 200, offline=True)]
        if len(engine.output("off")) < 5:
            return []
        parts.admission.core.plan = failing
        raise StopIteration

    engine.run(script)
    pulse = scheduler.get_internal_state(GetInternalStateReq(rid='coserve: ["pulse"]'))
    is_empty = scheduler.is_fully_idle() and not any(parts.requests.with_kv())
    offline = parts.status.state()["offline"]
    engine.run([engine.request(f"on{i}", scenarios.prompt(i, 40), 6) for i in range(3)])
    engine.run([engine.abort("off")])
    engine.assert_nothing_leaked()
    judged = interference.monitor.report(time.perf_counter()).requests
    known = len(interference) + len(parts.requests)
    return offline, list(pulse.internal_state.values()), is_empty, [judged, known]


def test_stopped_offline_work_holds_no_memory_and_says_why(start_engine: Any) -> None:
    """And online requests are judged on."""
    process: EngineProcess = start_engine(coserve=LOOSE, page_size=16)
    offline, pulse, is_empty, (judged, known) = process.call(run_stopped)
    assert offline["stopped_by"] == "ValueError: no plan"
    assert pulse == ["ValueError: no plan"]
    assert (offline["waiting"], offline["running"], offline["retracted"]) == (1, 0, 1)
    assert is_empty
    assert (judged, known) == (3, 0)
    process.close()


PAUSED: list[Spec] = [(f"off{i}", scenarios.prompt(70 + i, 200), 60, True) for i in range(3)]
"""Beside ``ALONE`` more than the KV pool holds."""
ALONE: Spec = ("on", scenarios.prompt(80, 60), 400, False)


def run_out_of_memory_without_plans(engine: ScriptedEngine) -> tuple[dict[str, list[int]], int]:
    """Plans fail from when an online request decodes beside paused ones until it has ended.

    The offline requests are paused by hand, as no target of today makes plans pause them for good.
    """
    from sglang.srt.managers import schedule_policy

    from sglang_coserve.srt.admission import fail_safe

    parts = engine.scheduler.parts
    plan, retracted = parts.admission.core.plan, parts.events["retracted"]

    def failing(*args: Any, **named: Any) -> Any:
        online = engine.reqs.get(ALONE[0])
        decodes = online is not None and online.output_ids and not online.finished()
        assert not (decodes and parts.queues.paused_requests.paused), "a plan that cannot be"
        return plan(*args, **named)

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            return [engine.request(*spec) for spec in PAUSED]
        if ALONE[0] in engine.reqs:
            if len(engine.output(ALONE[0])) < 3:
                return []
            rids = {spec[0] for spec in PAUSED}
            parts.queues.paused_requests.pause(engine.scheduler.running_batch, rids)
            raise StopIteration
        is_late = all(len(engine.output(spec[0])) > 5 for spec in PAUSED)
        return [engine.request(*ALONE)] if is_late else []

    with pytest.MonkeyPatch.context() as patch:
        # As with an output of more than 4096 tokens, SGLang does not see that memory will run out.
        patch.setattr(schedule_policy, "CLIP_MAX_NEW_TOKENS", 8)
        patch.setattr(fail_safe, "_MOST_IN_A_ROW", MAX_ITERATIONS)
        patch.setattr(parts.admission.core, "plan", failing)
        engine.run(script)
    engine.assert_nothing_leaked()
    assert parts.admission.state()["plans_failed"] > 100
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
    owner = type(parts.admission.core)
    update = owner.update

    def failing(core: Any, result: StepResult) -> None:
        assert not result.dropped, "a drop that cannot be"
        update(core, result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "update", failing)
        # The offline requests that wait for ever are aborted before anything is counted.
        patch.setattr(engine, "assert_nothing_leaked", lambda: None)
        outputs, times, _ = test_suspension.run_with(engine, test_suspension.pause)
    assert times
    engine.run([engine.abort(abort_all=True)])
    engine.assert_nothing_leaked()
    return outputs, dict(parts.advisory.off)


def test_a_pause_that_the_core_cannot_follow_stops_offline_work_alone(
    start_engine: Any, reference_outputs: Reference
) -> None:
    process = modes.start(start_engine, "overlap-page16-radix")
    outputs, off = process.call(run_a_pause_that_fails)
    expected = reference_outputs(test_suspension.WORK)
    assert all(output == expected[rid][: len(output)] for rid, output in outputs.items())
    assert off == {OFFLINE_WORK: "AssertionError: a drop that cannot be"}
    process.close()
