"""Suspended and resumed steps leave no trace: the same outputs, nothing leaked, nothing lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sglang_coserve.srt import compat
from sglang_coserve.srt.forward_kind import ForwardKind
from srt import test_scheduler as scenarios
from srt.conftest import Reference
from srt.safepoint.modes import MODES, QUICK, start
from srt.safepoint.random_suspensions import suspensions_of
from srt.scripted_engine import ScriptedEngine, Spec


def counts_of(engine: ScriptedEngine) -> Counter[str]:
    parts = engine.scheduler.parts
    stats = parts.lane.safepoints.stats
    return Counter(
        suspended=stats.suspensions.total(),
        resumed=stats.resumed,
        dropped=parts.events["dropped"],
    )


def run_mixed(
    engine: ScriptedEngine, specs: list[Spec], seed: int, probability: float, drops: float = 0.0
) -> tuple[dict[str, list[int]], set[str], Counter[str], set[int]]:
    stops = suspensions_of(engine)
    before = counts_of(engine)
    with stops.stopping(seed, probability, drops):
        outputs, aborted, _ = scenarios.run_mixed(engine, specs, seed)
    assert stops.lane.suspended is None
    counts = counts_of(engine) - before
    if not counts["dropped"]:
        # Each layer has computed each token of each step once.
        assert len(set(stops.tokens.values())) == 1, stops.tokens
        assert len(stops.tokens) == stops.num_layers
    return outputs, aborted, counts, set(stops.layers)


EVERY = [pytest.param(mode, marks=() if mode in QUICK else pytest.mark.heavy) for mode in MODES]


@pytest.mark.parametrize("modes", EVERY)
def test_outputs_are_those_of_stock_wherever_steps_stop(
    start_engine: Any, reference_outputs: Reference, modes: str
) -> None:
    specs = scenarios.mixed_specs(seed=1, num_online=30, num_offline=30)
    process = start(start_engine, modes)
    outputs, aborted, counts, layers = process.call(run_mixed, specs, 1, 0.7)
    scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
    assert counts["resumed"] >= 30
    assert counts["resumed"] + counts["dropped"] <= counts["suspended"]
    assert layers == set(range(6))


@pytest.mark.parametrize("modes", QUICK)
def test_dropped_steps_leave_no_trace(
    start_engine: Any, reference_outputs: Reference, modes: str
) -> None:
    """Far more are dropped here than memory ever asks for."""
    specs = scenarios.mixed_specs(seed=21, num_online=10, num_offline=15)
    outputs, aborted, counts, _ = start(start_engine, modes).call(run_mixed, specs, 21, 0.5, 0.2)
    scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
    assert counts["dropped"] > 20
    assert counts["resumed"] > 20


# --- While a step is suspended ------------------------------------------------------------


def run_while_suspended(
    engine: ScriptedEngine, seed: int, aborts: bool
) -> tuple[list[Spec], dict[str, list[int]], set[str], Counter[str]]:
    """Send large online requests, and client aborts of suspended requests, only while one is."""
    scheduler = engine.scheduler
    stops, rng = suspensions_of(engine), random.Random(seed)
    before = counts_of(engine)
    # Of the long ones no two fit, so that an online request needs the suspended one's memory.
    lengths = [60, 250, 450] if aborts else [700, 850]
    offline: list[Spec] = [
        (f"w{seed}-{i:02d}", scenarios.prompt(seed * 77 + i, rng.choice(lengths)), 20, True)
        for i in range(16)
    ]
    online: list[Spec] = [
        (
            f"v{seed}-{i:02d}",
            scenarios.prompt(seed * 99 + i, rng.choice((200, 500, 800))),
            12,
            False,
        )
        for i in range(12)
    ]
    specs = [*offline, *online]
    left = list(online)
    aborted: set[str] = set()

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            return [engine.request(*spec) for spec in offline]
        held = stops.lane.suspended
        messages = []
        if held is not None and left and not scheduler.waiting_queue and rng.random() < 0.3:
            messages.append(engine.request(*left.pop()))
        if held is not None and aborts and len(aborted) < 8 and rng.random() < 0.1:
            victim = rng.choice(held.batch.reqs).rid
            aborted.add(victim)
            messages.append(engine.abort(victim))
        if not left and scheduler.is_fully_idle():
            raise StopIteration
        if left and scheduler.is_fully_idle():  # No offline work is left to suspend.
            messages += [engine.request(*spec) for spec in left]
            left.clear()
        return messages

    with stops.stopping(seed, 0.7):
        engine.run(script)
    engine.assert_nothing_leaked()
    return specs, engine.outputs(specs), aborted, counts_of(engine) - before


@pytest.mark.parametrize("modes", QUICK)
@pytest.mark.parametrize("aborts", [False, True])
def test_online_requests_take_the_memory_of_a_suspended_step_and_clients_take_its_requests_back(
    start_engine: Any, reference_outputs: Reference, modes: str, aborts: bool
) -> None:
    process = start(start_engine, modes)
    seen = 0
    for seed in (1, 2):
        specs, outputs, aborted, counts = process.call(run_while_suspended, seed, aborts)
        scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
        seen += len(aborted) if aborts else counts["dropped"]
    assert seen > 3 if aborts else seen > 0


def run_with_ends(
    engine: ScriptedEngine, specs: list[Spec], seed: int
) -> tuple[dict[str, list[int]], set[str], int]:
    """End requests while they run, one after the other, and let others take their places.

    Returns the outputs, the ended requests, and how many of them a suspended step still had.
    """
    scheduler, stops, num_ended = engine.scheduler, suspensions_of(engine), 0
    online = [spec for spec in specs if not spec[3]]
    aborted: set[str] = set()

    def script(iteration: int) -> list[Any]:
        nonlocal num_ended
        if iteration == 0:
            return [engine.request(*spec) for spec in specs if spec[3]]
        held, messages = stops.lane.suspended, []
        if held is not None:
            places = held.batch.req_pool_indices_cpu.tolist()
            for req, place in zip(held.batch.reqs, places, strict=True):
                num_ended += not compat.holds_kv(req)
                assert place == (compat.slot_of(req) if compat.holds_kv(req) else 0)
            if online and not scheduler.waiting_queue:
                messages.append(engine.request(*online.pop()))
        elif len(aborted) < 12 and scheduler.last_batch is not None:
            running = [req.rid for req in scheduler.last_batch.reqs if req.rid.startswith("end")]
            aborted.update(running[-1:])
            messages += [engine.abort(rid) for rid in running[-1:]]
        if scheduler.is_fully_idle():
            assert not online
            raise StopIteration
        return messages

    with stops.stopping(seed, 0.7):
        engine.run(script)
    engine.assert_nothing_leaked()
    return engine.outputs(specs), aborted, num_ended


@pytest.mark.parametrize("modes", QUICK)
def test_a_resumed_step_leaves_alone_what_its_ended_requests_had(
    start_engine: Any, reference_outputs: Reference, modes: str
) -> None:
    """Under overlap scheduling a step still has the requests that ended with the step before it."""
    specs: list[Spec] = [
        (f"end{i:02d}", scenarios.prompt(500 + i, 40), 20, True) for i in range(24)
    ]
    specs += [(f"new{i:02d}", scenarios.prompt(600 + i, 90), 6, False) for i in range(16)]
    process, overlaps, seen = start(start_engine, modes), modes.startswith("overlap"), 0
    # Step times decide which steps are suspended, so a round may have none.
    for seed in range(12 if overlaps else 2):
        outputs, aborted, num_ended = process.call(run_with_ends, specs, seed)
        scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
        seen += num_ended
        if seen:
            break
    assert (seen > 0) == overlaps


# --- What an operator does meanwhile ------------------------------------------------------

WORK: list[Spec] = [(f"work{i}", scenarios.prompt(i, 300), 12, True) for i in range(6)]


def run_with(
    engine: ScriptedEngine, meanwhile: Callable[[ScriptedEngine, int], list[Any]]
) -> tuple[dict[str, list[int]], int, Counter[str]]:
    """Do something while a step is suspended, a few times; its messages come one a pass."""
    scheduler, stops = engine.scheduler, suspensions_of(engine)
    before, times = counts_of(engine), 0
    to_send: list[Any] = []

    def script(iteration: int) -> list[Any]:
        nonlocal times
        if iteration == 0:
            return [engine.request(*spec) for spec in WORK]
        if not to_send and stops.lane.suspended is not None and times < 5:
            times += 1
            to_send.extend(meanwhile(engine, times))
        if to_send:
            return [to_send.pop(0)]
        if scheduler.is_fully_idle():
            raise StopIteration
        return []

    with stops.stopping(7, 0.7):
        engine.run(script)
    engine.assert_nothing_leaked()
    assert stops.lane.suspended is None
    return engine.outputs(WORK), times, counts_of(engine) - before


def flush(engine: ScriptedEngine, _: int) -> list[Any]:
    scheduler = engine.scheduler
    assert not scheduler.is_fully_idle()
    assert not scheduler.flush_cache()
    # Since 0.5.22 SGLang, while paused, flushes its cache though requests wait: not their KV.
    scheduler._engine_paused = True
    assert not scheduler.flush_cache()
    scheduler._engine_paused = False
    return []


def pause(engine: ScriptedEngine, times: int) -> list[Any]:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    # To be aborted would be another scenario.
    mode = ("in_place", "retract")[times % 2]
    return [PauseGenerationReqInput(mode=mode), ContinueGenerationReqInput()]


@pytest.mark.parametrize("modes", QUICK)
@pytest.mark.parametrize(("meanwhile", "drops"), [(flush, False), (pause, True)])
def test_a_suspended_step_is_work_and_is_dropped_for_a_pause(
    start_engine: Any,
    reference_outputs: Reference,
    modes: str,
    meanwhile: Callable[[ScriptedEngine, int], list[Any]],
    drops: bool,
) -> None:
    """Weights may change in a pause: no layer of the old ones may be followed by one of the new."""
    outputs, times, counts = start(start_engine, modes).call(run_with, meanwhile)
    assert outputs == reference_outputs(WORK)
    assert times == 5
    assert counts["dropped"] == (times if drops else 0)
    assert counts["resumed"] > 5


ONLINE: list[Spec] = [(f"on{i}", scenarios.prompt(90 + i, 60), 6, False) for i in range(6)]


def run_with_decodes_that_end(engine: ScriptedEngine) -> Any:
    """As on a GPU, where a decode step is a single graph."""
    safepoints, stops = engine.scheduler.parts.lane.safepoints, suspensions_of(engine)
    before = Counter(safepoints.stats.suspensions)
    safepoints._no_safepoints = {ForwardKind.DECODE: "one piece"}
    with stops.stopping(9, 0.7):
        outputs, aborted, _ = scenarios.run_mixed(engine, [*WORK, *ONLINE], 1)
    safepoints._no_safepoints = {}
    suspended = safepoints.stats.suspensions - before
    return outputs, aborted, suspended, safepoints.stats.ran_to_end["one piece"]


@pytest.mark.parametrize("modes", QUICK)
def test_decodes_of_the_lane_that_run_to_their_end(
    start_engine: Any, reference_outputs: Reference, modes: str
) -> None:
    """With overlap the next one is prepared before the results of the last are there."""
    process = start(start_engine, modes)
    outputs, aborted, suspended, kept = process.call(run_with_decodes_that_end)
    specs = [*WORK, *ONLINE]
    scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
    assert suspended[ForwardKind.DECODE] == 0
    assert suspended.total() > 5
    assert kept > 5


def run_abort_and_drop(engine: ScriptedEngine) -> int:
    """Abort prefills of suspended steps, and drop the step; return how many there were."""
    scheduler, stops = engine.scheduler, suspensions_of(engine)
    dropped_at: dict[str, int] = {}

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            return [engine.request(*spec) for spec in WORK]
        held = stops.lane.suspended
        if held is not None and held.batch.forward_mode.is_extend() and len(dropped_at) < 4:
            rid = held.batch.reqs[0].rid
            scheduler.abort_request(engine.abort(rid))
            scheduler.parts.admission.give_up()
            dropped_at[rid] = len(engine.iterations)
        if scheduler.is_fully_idle():
            raise StopIteration
        return []

    with stops.stopping(9, 0.7):
        engine.run(script)
    engine.assert_nothing_leaked()
    for rid, first in dropped_at.items():
        assert all(rid not in iteration.rids for iteration in engine.iterations[first:])
    return len(dropped_at)


@pytest.mark.parametrize("modes", QUICK)
def test_an_aborted_prefill_does_not_go_on_when_its_step_is_dropped(
    start_engine: Any, modes: str
) -> None:
    assert start(start_engine, modes).call(run_abort_and_drop) > 1


def run_departures(engine: ScriptedEngine, sampling: dict[str, float]) -> tuple[set[str], int]:
    """Abort offline requests that only wait for online decodes, which leave them no time.

    Returns in which places they were, and how many passes later the last one was gone.
    """
    scheduler, stops, parts = engine.scheduler, suspensions_of(engine), engine.scheduler.parts
    aborted: dict[str, str] = {}
    ended_after = None
    first = 0

    def script(iteration: int) -> list[Any]:
        nonlocal ended_after, first
        if iteration == 0:
            return [engine.request(*spec, **sampling) for spec in WORK]
        if stops.lane.suspended is not None and "online" not in engine.reqs:
            stops.stop()
            return [engine.request("online", scenarios.prompt(80, 20), 100)]
        if "online" in engine.reqs and len(engine.output("online")) >= 3 and not first:
            first = iteration
            held = {
                "suspended": parts.queues.suspended,
                "paused": parts.queues.paused_requests.reqs,
            }
            aborted.update({req.rid: place for place in held for req in held[place]})
            return [engine.abort(rid) for rid in aborted]
        if first and ended_after is None and not any(rid in parts.requests for rid in aborted):
            ended_after = iteration - first
            assert len(engine.output("online")) < 100
            return [engine.abort(abort_all=True)]
        if scheduler.is_fully_idle():
            raise StopIteration
        return []

    with stops.stopping(7, 0.7):
        engine.run(script)
    engine.assert_nothing_leaked()
    del engine.reqs["online"]
    assert ended_after is not None, aborted
    return set(aborted.values()), ended_after


@pytest.mark.parametrize("modes", QUICK)
def test_what_a_client_leaves_behind_ends_though_it_is_not_to_run(
    start_engine: Any, modes: str
) -> None:
    process = start(start_engine, modes, slo_tpot_ms=0.01)
    for sampling in ({}, {"frequency_penalty": 0.5}):
        places, passes = process.call(run_departures, sampling)
        assert "suspended" in places
        assert passes <= 4
