"""Suspended and resumed steps leave no trace: the same outputs, nothing leaked, nothing lost."""

from __future__ import annotations

import random
from typing import Any

import pytest

from srt import test_scheduler as scenarios
from srt.conftest import Reference
from srt.safepoint.random_suspensions import suspensions_of
from srt.safepoint.test_rollback import MODES, QUICK, start
from srt.scripted_engine import EngineProcess, ScriptedEngine, Spec


def start_suspending(start_engine: Any, modes: str) -> EngineProcess:
    return start(start_engine, MODES[modes], safepoint_mode="suspend")


def counts_of(engine: ScriptedEngine) -> dict[str, int]:
    parts = engine.scheduler.parts
    state = parts.runner.state()["safepoints"]
    return {
        "suspended": state["suspended"],
        "resumed": state["resumed"],
        "dropped": parts.events["dropped"],
    }


def run_mixed(
    engine: ScriptedEngine, specs: list[Spec], seed: int, probability: float
) -> tuple[dict[str, list[int]], set[str], dict[str, int], set[int]]:
    stops = suspensions_of(engine)
    before = counts_of(engine)
    stops.start(seed, probability)
    try:
        outputs, aborted, _ = scenarios.run_mixed(engine, specs, seed)
    finally:
        stops.stop()
    engine.assert_nothing_leaked()
    assert stops.lane.suspended is None
    assert not len(engine.scheduler.parts.ledger)
    counts = {name: n - before[name] for name, n in counts_of(engine).items()}
    if not counts["dropped"]:
        # Each layer has computed each token of each step once.
        assert len(set(stops.tokens.values())) == 1, stops.tokens
        assert len(stops.tokens) == stops.num_layers
    return outputs, aborted, counts, set(stops.layers)


def check_outputs(
    process: EngineProcess, reference_outputs: Reference, *, seed: int, size: int
) -> None:
    specs = scenarios.mixed_specs(seed=seed, num_online=size, num_offline=size)
    outputs, aborted, counts, layers = process.call(run_mixed, specs, seed, 0.7)
    scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
    assert counts["resumed"] >= size
    assert counts["resumed"] + counts["dropped"] <= counts["suspended"]
    assert layers == set(range(6))


@pytest.mark.parametrize("modes", QUICK)
def test_outputs_are_those_of_stock_wherever_steps_stop(
    start_engine: Any, reference_outputs: Reference, modes: str
) -> None:
    process = start_suspending(start_engine, modes)
    check_outputs(process, reference_outputs, seed=1, size=30)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("modes", MODES)
def test_outputs_are_those_of_stock_in_every_mode(
    start_engine: Any, reference_outputs: Reference, modes: str, seed: int
) -> None:
    process = start_suspending(start_engine, modes)
    check_outputs(process, reference_outputs, seed=seed, size=60)


# --- While a step is suspended ------------------------------------------------------------


def run_while_suspended(
    engine: ScriptedEngine, seed: int, aborts: bool
) -> tuple[list[Spec], dict[str, list[int]], set[str], dict[str, int]]:
    """Send large online requests, and client aborts of suspended rows, only while one is."""
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
            return [engine.request(*spec[:3], offline=True) for spec in offline]
        held = stops.lane.suspended
        messages = []
        if held is not None and left and not scheduler.waiting_queue and rng.random() < 0.3:
            messages.append(engine.request(*left.pop()[:3]))
        if held is not None and aborts and len(aborted) < 8 and rng.random() < 0.1:
            victim = rng.choice(held.batch.reqs).rid
            aborted.add(victim)
            messages.append(engine.abort(victim))
        if not left and scheduler.is_fully_idle():
            raise StopIteration
        if left and scheduler.is_fully_idle():  # No offline work is left to suspend.
            messages += [engine.request(*spec[:3]) for spec in left]
            left.clear()
        return messages

    stops.start(seed, 0.7)
    try:
        engine.run(script)
    finally:
        stops.stop()
    outputs = {spec[0]: engine.output(spec[0]) for spec in specs}
    engine.assert_nothing_leaked()
    counts = {name: n - before[name] for name, n in counts_of(engine).items()}
    return specs, outputs, aborted, counts


@pytest.mark.parametrize("modes", QUICK)
@pytest.mark.parametrize("aborts", [False, True])
def test_online_requests_take_the_memory_of_a_suspended_step_and_clients_take_its_rows_back(
    start_engine: Any, reference_outputs: Reference, modes: str, aborts: bool
) -> None:
    process = start_suspending(start_engine, modes)
    seen = 0
    for seed in (1, 2):
        specs, outputs, aborted, counts = process.call(run_while_suspended, seed, aborts)
        scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
        seen += len(aborted) if aborts else counts["dropped"]
    assert seen > 3 if aborts else seen > 0
