"""Checkpointed offline KV: the outputs of stock, nothing leaked, hardly anything recomputed."""

from __future__ import annotations

import threading
from inspect import signature
from typing import Any

import pytest

from sglang_coserve.srt import compat
from sglang_coserve.srt.kv_checkpoint.strategies import Eager
from srt import test_scheduler as scenarios
from srt.conftest import Reference
from srt.scripted_engine import EngineProcess, ScriptedEngine, Spec

KINDS = [
    pytest.param(("eager", True, 16), id="eager-overlap-page16"),
    pytest.param(("lazy", False, 1), id="lazy-normal-page1"),
    pytest.param(("eager", False, 1), id="eager-normal-page1", marks=pytest.mark.heavy),
    pytest.param(("lazy", False, 16), id="lazy-normal-page16", marks=pytest.mark.heavy),
]
"""Strategy, whether the event loop overlaps, page size: each value in those not heavy."""


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, start_checkpointing: Any) -> EngineProcess:
    mode, overlap, page_size = request.param
    return start_checkpointing(mode, overlap=overlap, page_size=page_size)


# --- Everything at once -------------------------------------------------------------------


def duplicated_specs(seed: int, num_online: int, num_offline: int) -> list[Spec]:
    """Random requests; every fourth has the prompt of the one before it."""
    specs = scenarios.mixed_specs(seed, num_online, num_offline)
    for place in range(3, len(specs), 4):
        rid, _, max_new_tokens, is_offline = specs[place]
        specs[place] = (rid, specs[place - 1][1], max_new_tokens, is_offline)
    return specs


def run_mixed(engine: ScriptedEngine, specs: list[Spec], seed: int) -> Any:
    before = engine.kv_figures()
    outputs, aborted, count = scenarios.run_mixed(engine, specs, seed)
    after = engine.kv_figures()
    return outputs, aborted, count, after["demoted_tokens"] - before["demoted_tokens"]


def test_mixed_requests_finish_with_the_outputs_of_stock(
    engine: EngineProcess, reference_outputs: Reference
) -> None:
    specs = duplicated_specs(seed=21, num_online=10, num_offline=15)
    outputs, aborted, count, demoted = engine.call(run_mixed, specs, 3)
    scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
    assert count["retracted"] > 0
    assert demoted > 0


# --- One preemption -----------------------------------------------------------------------

VICTIMS: list[Spec] = [(f"off{i}", scenarios.prompt(40 + i, 60), 150, True) for i in range(4)]
"""All fit: since 0.5.22 SGLang counts the whole output of a request that ignores EOS as taken."""
HOG: Spec = ("on", scenarios.prompt(50, 700), 40, False)


def run_preemption(engine: ScriptedEngine) -> Any:
    """A large online request arrives when the offline requests have generated many tokens."""
    before = engine.kv_figures()
    counts = scenarios.counts(engine)

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            engine.reqs.clear()
            return [engine.request(*spec) for spec in VICTIMS]
        if HOG[0] in engine.reqs:
            raise StopIteration
        is_late = all(len(engine.output(spec[0])) >= 60 for spec in VICTIMS)
        return [engine.request(*HOG)] if is_late else []

    engine.run(script)
    after = engine.kv_figures()
    engine.assert_nothing_leaked()
    recomputed = [s["recompute"]["offline"]["recomputed_tokens"] for s in (before, after)]
    retracted = (scenarios.counts(engine) - counts)["retracted"]
    prefetched = after["prefetch_published_tokens"] - before["prefetch_published_tokens"]
    return engine.outputs([HOG, *VICTIMS]), retracted, recomputed[1] - recomputed[0], prefetched


def most_recomputed(mode: str, page_size: int, retracted: int) -> int:
    """Return the tokens that may be computed again after so many preemptions."""
    unsaved = page_size if mode == "lazy" else max(page_size, Eager().least_copy_tokens)
    # The last token of a request is always computed, so that there is one to continue from.
    return retracted * (unsaved + 1)


@pytest.mark.parametrize(
    ("mode", "overlap", "page_size"),
    [
        ("eager", True, 16),
        ("lazy", False, 1),
        pytest.param("eager", False, 1, marks=pytest.mark.heavy),
    ],
)
def test_a_preempted_request_recomputes_only_what_was_not_worth_a_copy(
    start_checkpointing: Any,
    reference_outputs: Reference,
    mode: str,
    overlap: bool,
    page_size: int,
) -> None:
    engine = start_checkpointing(mode, overlap=overlap, page_size=page_size)
    outputs, retracted, recomputed, prefetched = engine.call(run_preemption)
    assert outputs == reference_outputs([HOG, *VICTIMS])
    assert retracted > 0
    assert prefetched > 0
    assert recomputed <= most_recomputed(mode, page_size, retracted)


# --- What can fail ------------------------------------------------------------------------


def run_with_little_host_memory(engine: ScriptedEngine, specs: list[Spec]) -> Any:
    cache = engine.scheduler.tree_cache
    cache.space.limit_tokens = 6 * cache.page_size
    outputs, aborted, _ = scenarios.run_mixed(engine, specs, 4)
    return outputs, aborted, engine.kv_figures()


def test_a_full_host_pool_costs_recomputation_only(
    start_checkpointing: Any, reference_outputs: Reference
) -> None:
    engine = start_checkpointing("eager", overlap=True, page_size=16)
    specs = duplicated_specs(seed=23, num_online=10, num_offline=15)
    outputs, aborted, stats = engine.call(run_with_little_host_memory, specs)
    scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
    assert stats["allocation_failures"] > 0
    assert stats["backed_off_steps"] > stats["allocation_failures"]
    assert stats["recompute"]["offline"]["recomputed_tokens"] > 0


def run_with_stuck_copies(engine: ScriptedEngine, specs: list[Spec]) -> Any:
    """The copy engine stops for many steps, then goes on."""
    gate, batches = threading.Event(), list[Any]()
    compat.copy_streams(engine.scheduler.tree_cache.cache_controller)[0].submit(gate.wait)
    store = engine.scheduler.parts.kv_store
    computed = store.computed

    def open_late(batch: Any) -> None:
        batches.append(batch)
        if len(batches) == 600:
            gate.set()
        computed(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "computed", open_late)
        outputs, aborted, _ = scenarios.run_mixed(engine, specs, 4)
    assert gate.is_set(), "the scenario is too short"
    return outputs, aborted, engine.kv_figures()


@pytest.mark.parametrize(
    ("mode", "overlap", "page_size", "counted"),
    [
        ("eager", True, 16, "stalled_steps"),
        pytest.param("lazy", False, 1, "late_copies", marks=pytest.mark.heavy),
    ],
)
def test_a_stuck_copy_engine_costs_recomputation_only(
    start_checkpointing: Any,
    reference_outputs: Reference,
    mode: str,
    overlap: bool,
    page_size: int,
    counted: str,
) -> None:
    engine = start_checkpointing(mode, overlap=overlap, page_size=page_size)
    specs = duplicated_specs(seed=24, num_online=20, num_offline=30)
    outputs, aborted, stats = engine.call(run_with_stuck_copies, specs)
    scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
    assert stats[counted] > 0


def run_with_stuck_loads(engine: ScriptedEngine, specs: list[Spec]) -> Any:
    """What waits on the host does not come back, until long after that was noticed."""
    cache, gate = engine.scheduler.tree_cache, threading.Event()
    store = engine.scheduler.parts.kv_store
    start, computed = compat.start_load, store.computed
    batches_since: list[Any] = []

    def start_late(controller: Any, *load: Any) -> None:
        compat.copy_streams(controller)[1].submit(gate.wait)
        start(controller, *load)

    def open_at_last(batch: Any) -> None:
        computed(batch)
        if cache.counts["refused_loads"]:
            batches_since.append(batch)
        if len(batches_since) > 150:
            gate.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "start_load", start_late)
        patch.setattr(cache.prefetches, "timeout_s", 0.05)
        patch.setattr(store, "computed", open_at_last)
        outputs, aborted, _ = scenarios.run_mixed(engine, specs, 4)
    assert gate.is_set(), "nothing was to be loaded"
    return outputs, aborted, engine.kv_figures()


def test_loads_that_do_not_come_back_cost_recomputation_only(
    start_checkpointing: Any, reference_outputs: Reference
) -> None:
    engine = start_checkpointing("eager", overlap=True, page_size=16)
    specs = duplicated_specs(seed=25, num_online=10, num_offline=15)
    outputs, aborted, stats = engine.call(run_with_stuck_loads, specs)
    scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
    assert stats["refused_loads"] > 0
    assert stats["recompute"]["offline"]["recomputed_tokens"] > 0


def run_flush_in_a_pause(engine: ScriptedEngine) -> dict[str, list[int]]:
    """Pause while a copy is in flight, and flush the cache when it has ended."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
    from sglang.srt.managers.scheduler import Scheduler

    scheduler = engine.scheduler
    cache, has_paused = scheduler.tree_cache, False
    gate = threading.Event()

    def script(iteration: int) -> list[Any]:
        nonlocal has_paused
        if iteration == 0:
            compat.copy_streams(cache.cache_controller)[0].submit(gate.wait)
            return [engine.request(*spec) for spec in VICTIMS]
        if not has_paused:
            has_paused = bool(cache.ongoing_write_through)
            return [PauseGenerationReqInput(mode="retract")] if has_paused else []
        if gate.is_set():
            raise StopIteration
        assert cache.ongoing_write_through
        assert not scheduler.flush_cache()  # It would free what is being copied.
        gate.set()
        have_ended = threading.Event()
        compat.copy_streams(cache.cache_controller)[0].submit(have_ended.set)
        assert have_ended.wait(60)
        # Before 0.5.22 a paused engine never flushes its cache while requests wait.
        flushes = "ignore_waiting" in signature(Scheduler.is_fully_idle).parameters
        assert scheduler.flush_cache() is flushes
        return [ContinueGenerationReqInput()]

    engine.run(script)
    engine.assert_nothing_leaked()
    return engine.outputs(VICTIMS)


def test_a_paused_engine_flushes_its_cache_once_copies_have_ended(
    start_checkpointing: Any, reference_outputs: Reference
) -> None:
    engine = start_checkpointing("eager", overlap=True, page_size=16)
    assert engine.call(run_flush_in_a_pause) == reference_outputs(VICTIMS)


# --- Memory that no running request holds -----------------------------------------------------

PARKED: Spec = ("off", scenarios.prompt(60, 900), 8, True)
BIG: Spec = ("on", scenarios.prompt(61, 300), 400, False)


def run_online_behind_a_parked_request(engine: ScriptedEngine) -> tuple[dict[str, list[int]], int]:
    """An online request comes when one offline prompt is half computed and nothing else runs.

    There is room for its prompt, but not for its output too, which SGLang reserves.
    """
    served: list[int] = []

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            return [engine.request(*PARKED)]
        if iteration == 5:
            return [engine.request(*BIG)]
        if iteration > 5 and engine.reqs["on"].finished():
            served.append(iteration)
            raise StopIteration
        return []

    engine.run(script)
    engine.assert_nothing_leaked()
    return engine.outputs([PARKED, BIG]), served[0]


def test_an_online_request_gets_the_memory_of_a_parked_request(
    start_checkpointing: Any, reference_outputs: Reference
) -> None:
    engine = start_checkpointing("eager", overlap=True, page_size=16)
    outputs, served = engine.call(run_online_behind_a_parked_request)
    assert outputs == reference_outputs([PARKED, BIG])
    # Its prompt takes three passes, its output 400.
    assert served < 450
