"""Scenarios on the real scheduler: what each class gets, pass by pass."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from inspect import signature
from itertools import islice
from typing import Any

import pytest

from srt.conftest import CHUNK_TOKENS, KV_POOL_TOKENS, Reference
from srt.scripted_engine import EngineProcess, Iteration, ScriptedEngine, Spec


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(10, 700), k=length)


def first_pass(iterations: Sequence[Iteration], rid: str) -> int:
    return next(i for i, iteration in enumerate(iterations) if rid in iteration.rids)


def counts(engine: ScriptedEngine) -> Counter[str]:
    return Counter(engine.scheduler.parts.events)


# --- Online-only traffic ------------------------------------------------------------------


def run_online_only(engine: ScriptedEngine) -> tuple[list[Any], dict[str, list[int]]]:
    rng = random.Random(7)
    lengths = [(rng.randrange(5, 300), rng.randrange(1, 40)) for _ in range(15)]
    specs = [(f"r{i}", prompt(i, length), m, False) for i, (length, m) in enumerate(lengths)]
    waiting = (engine.request(*spec) for spec in specs)
    arrivals = {0: 5, 3: 2, 9: 4, 10: 1, 25: 3}
    iterations = engine.run({step: list(islice(waiting, n)) for step, n in arrivals.items()})
    engine.assert_nothing_leaked()
    return [(i.rids, i.is_extend, i.extend_lens) for i in iterations], engine.outputs(specs)


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_online_only_traffic_is_scheduled_exactly_as_stock_does(
    start_engine: Any, overlap: bool
) -> None:
    ours = start_engine(overlap=overlap, page_size=1).call(run_online_only)
    stock = start_engine(stock=True, overlap=overlap, page_size=1).call(run_online_only)
    assert ours == stock
    assert len({tuple(output) for output in ours[1].values()}) == 15


# --- Admission ----------------------------------------------------------------------------


def run_offline_first_in_line(engine: ScriptedEngine) -> list[Iteration]:
    offline = [engine.request(f"off{i}", prompt(i, 60), 4, offline=True) for i in range(3)]
    online = [engine.request(f"on{i}", prompt(10 + i, 60), 4) for i in range(3)]
    return engine.run(offline + online)


def test_offline_requests_are_prefilled_in_their_order_after_online_ones_that_came_later(
    engine: EngineProcess,
) -> None:
    iterations = engine.call(run_offline_first_in_line)
    last_online = max(first_pass(iterations, f"on{i}") for i in range(3))
    offline = [first_pass(iterations, f"off{i}") for i in range(3)]
    assert offline == sorted(offline)
    assert last_online < offline[0]


def run_with_limit(engine: ScriptedEngine) -> int:
    engine.run([engine.request(f"off{i}", prompt(i, 40), 6, offline=True) for i in range(7)])
    engine.assert_nothing_leaked()
    return max(len(i.rids) for i in engine.iterations)


def test_offline_max_running_bounds_the_offline_requests(start_engine: Any) -> None:
    process = start_engine(coserve={"offline_max_running": 2})
    assert process.call(run_with_limit) == 2


# --- Giving way ---------------------------------------------------------------------------

LONG_OFFLINE: Spec = ("off", prompt(1, 5 * CHUNK_TOKENS), 8, True)
SHORT_ONLINE: Spec = ("on", prompt(2, 50), 8, False)


def run_arrival_in_the_middle_of_a_prefill(
    engine: ScriptedEngine,
) -> tuple[list[Iteration], dict[str, list[int]]]:
    specs = LONG_OFFLINE, SHORT_ONLINE
    iterations = engine.run({0: [engine.request(*specs[0])], 2: [engine.request(*specs[1])]})
    engine.assert_nothing_leaked()
    return iterations, engine.outputs(specs)


def test_an_online_request_that_arrives_in_the_middle_of_an_offline_prefill_is_next(
    engine: EngineProcess, reference_outputs: Reference
) -> None:
    iterations, outputs = engine.call(run_arrival_in_the_middle_of_a_prefill)
    assert outputs == reference_outputs([LONG_OFFLINE, SHORT_ONLINE])
    # Two chunks ran before the arrival.
    assert first_pass(iterations, "on") == 2
    # No token of the offline prompt was computed twice.
    prefilled = sum(
        length
        for iteration in iterations
        for rid, length in zip(iteration.rids, iteration.extend_lens, strict=False)
        if rid == "off"
    )
    assert prefilled <= len(LONG_OFFLINE[1]) + 16  # less than a page more


BIG_ONLINE: Spec = ("on", prompt(3, KV_POOL_TOKENS // 2), 16, False)
MANY_OFFLINE: list[Spec] = [(f"off{i}", prompt(20 + i, 60), 120, True) for i in range(6)]
BIG_ARRIVES = 60


def run_big_online_among_many_offline(
    engine: ScriptedEngine,
) -> tuple[list[Iteration], dict[str, list[int]], int]:
    before = counts(engine)
    offline = [engine.request(*spec) for spec in MANY_OFFLINE]
    iterations = engine.run({0: offline, BIG_ARRIVES: [engine.request(*BIG_ONLINE)]})
    engine.assert_nothing_leaked()
    outputs = engine.outputs([BIG_ONLINE, *MANY_OFFLINE])
    return iterations, outputs, (counts(engine) - before)["retracted"]


def test_offline_decodes_are_retracted_when_an_online_request_does_not_fit(
    engine: EngineProcess, reference_outputs: Reference
) -> None:
    iterations, outputs, num_retracted = engine.call(run_big_online_among_many_offline)
    assert num_retracted >= 1
    assert first_pass(iterations, "on") <= BIG_ARRIVES + 2
    assert outputs == reference_outputs([BIG_ONLINE, *MANY_OFFLINE])


def run_offline_that_does_not_fit(engine: ScriptedEngine) -> list[Iteration]:
    hog = engine.request("hog", prompt(4, 700), 200, offline=True)
    next_hog = engine.request("next", prompt(5, 700), 200, offline=True)
    iterations = engine.run({0: [hog, next_hog], 30: [engine.request("on", prompt(6, 40), 4)]})
    engine.assert_nothing_leaked()
    return iterations


def test_an_offline_request_that_does_not_fit_does_not_block_a_small_online_one(
    engine: EngineProcess,
) -> None:
    iterations = engine.call(run_offline_that_does_not_fit)
    assert first_pass(iterations, "on") <= 32
    assert first_pass(iterations, "next") > first_pass(iterations, "on")


# --- Control messages ---------------------------------------------------------------------


def run_idle_questions(engine: ScriptedEngine) -> dict[str, Any]:
    from sglang.srt.managers.scheduler import Scheduler

    scheduler, seen = engine.scheduler, {}

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            # Paused, so that the request stays where it arrived.
            scheduler._engine_paused = True
            return [engine.request("off", prompt(1, 20), 4, offline=True)]
        seen["idle"] = scheduler.is_fully_idle()
        seen["health_check_idle"] = scheduler.is_fully_idle(for_health_check=True)
        # Since 0.5.22 a paused engine flushes its cache though requests wait, if they hold no KV.
        flushes = "ignore_waiting" in signature(Scheduler.is_fully_idle).parameters
        assert scheduler.flush_cache() is flushes
        scheduler._engine_paused = False
        assert not scheduler.flush_cache()
        raise StopIteration

    engine.run(script)
    engine.assert_nothing_leaked()
    return seen


def test_a_waiting_offline_request_is_work_for_flush_but_not_for_the_health_check(
    engine: EngineProcess,
) -> None:
    assert engine.call(run_idle_questions) == {"idle": False, "health_check_idle": True}


# --- Everything at once -------------------------------------------------------------------


def mixed_specs(seed: int, num_online: int, num_offline: int) -> list[Spec]:
    """Random lengths; a fifth of the prompts share one of three long prefixes."""
    rng = random.Random(seed)
    shared = [prompt(1000 + i, 120) for i in range(3)]
    specs: list[Spec] = []
    for i in range(num_online + num_offline):
        offline = i < num_offline
        tokens = prompt(seed * 1000 + i, rng.choice([3, 17, 90, 350, 500]))
        if rng.random() < 0.2:
            tokens = rng.choice(shared) + tokens
        specs.append((f"r{i:03d}", tokens, rng.randrange(1, 150 if offline else 40), offline))
    return specs


def run_mixed(
    engine: ScriptedEngine, specs: Sequence[Spec], seed: int
) -> tuple[dict[str, list[int]], set[str], Counter[str]]:
    """An offline backlog from the start, online requests in bursts, aborts of either class."""
    rng = random.Random(seed)
    online = [spec for spec in specs if not spec[3]]
    sent: list[str] = []
    aborted: set[str] = set()
    before = counts(engine)

    def send(spec: Spec) -> Any:
        sent.append(spec[0])
        return engine.request(*spec)

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            return [send(spec) for spec in specs if spec[3]]
        if not online:
            raise StopIteration
        messages = []
        # Not before the last burst is served, or offline requests would never run.
        if not engine.scheduler.waiting_queue and rng.random() < 0.1:
            size = rng.randrange(1, 6)
            messages = [send(spec) for spec in online[:size]]
            del online[:size]
        if rng.random() < 0.01:
            victim = rng.choice(sent)
            aborted.add(victim)
            messages.append(engine.abort(victim))
        return messages

    engine.run(script)
    engine.assert_nothing_leaked()
    return engine.outputs(specs), aborted, counts(engine) - before


def assert_outputs(
    specs: Sequence[Spec],
    outputs: dict[str, list[int]],
    aborted: set[str],
    expected: dict[str, list[int]],
) -> None:
    """Every request generated what it should; an aborted one a part of it."""
    for rid, _, max_new_tokens, _ in specs:
        if rid not in aborted:
            assert len(outputs[rid]) == max_new_tokens
        assert outputs[rid] == expected[rid][: len(outputs[rid])]


def test_a_hundred_mixed_requests_finish_with_the_outputs_of_stock(
    engine: EngineProcess, reference_outputs: Reference
) -> None:
    specs = mixed_specs(seed=11, num_online=40, num_offline=60)
    outputs, aborted, count = engine.call(run_mixed, specs, 5)
    assert_outputs(specs, outputs, aborted, reference_outputs(specs))
    assert aborted
    # The pool was small enough for the scenario to mean something.
    assert count["retracted"] >= 5
    assert count["parked"] >= 1


def run_too_long_offline_prompts(engine: ScriptedEngine) -> dict[str, Any]:
    """Prompts beyond the context fail validation inside the scheduler, among good ones."""
    lengths, before = {"good": 30, "bad": 1100}, counts(engine)
    engine.run(
        {
            i: [
                engine.request(f"{name}{i}", prompt(i, length), 4, offline=True)
                for name, length in lengths.items()
            ]
            for i in range(7)
        }
    )
    engine.assert_nothing_leaked()
    return {
        "bad": {type(engine.reqs[f"bad{i}"].finished_reason).__name__ for i in range(7)},
        "good": {len(engine.output(f"good{i}")) for i in range(7)},
        "admitted": (counts(engine) - before)["admitted"],
    }


def test_an_offline_request_that_fails_validation_is_answered(engine: EngineProcess) -> None:
    assert engine.call(run_too_long_offline_prompts) == {
        "bad": {"FINISH_ABORT"},
        "good": {4},
        "admitted": 7,
    }
