"""Reclaiming what is still being copied: it is waited for, but not for a copy that hangs."""

from __future__ import annotations

import threading

from kv_bench.rows import new_request
from sglang_coserve.core.kv_checkpoint import CheckpointMode, CheckpointPolicy
from srt.kv_checkpoint.bare_cache import BareEngine

PROMPT_TOKENS = 40


def engine() -> BareEngine:
    return BareEngine(
        CheckpointPolicy(CheckpointMode.EAGER, reclaim_tokens=1),
        slots=64,
        host_slots=256,
        page_tokens=4,
    )


def retract(engine: BareEngine, rid: str, token: int, gate: threading.Event | None = None) -> None:
    """A request is computed, its copy is begun, which a gate keeps from ending; it is released."""
    request = new_request(rid, [token] * PROMPT_TOKENS, offline=True)
    assert engine.admit(request)
    if gate is not None:
        engine.copy_streams[0].submit(gate.wait)
    engine.checkpoint()
    engine.release(request)


def test_a_copy_that_was_waited_for_in_vain_does_not_cost_the_later_ones() -> None:
    bare, gate = engine(), threading.Event()
    copies = bare.copy_streams[0]

    retract(bare, "late", 1, gate)
    bare.evict(PROMPT_TOKENS)
    assert bare.cache.counts["dropped_tokens"] == PROMPT_TOKENS
    gate.set()
    copies.synchronize()

    retract(bare, "in time", 2)
    copies.synchronize()  # Done, but nobody has taken note of it.
    bare.evict(PROMPT_TOKENS)
    assert bare.cache.counts["dropped_tokens"] == PROMPT_TOKENS
    assert bare.cache.counts["demoted_tokens"] == PROMPT_TOKENS


def test_one_reclaim_after_another_waits_once_for_a_copy_that_hangs() -> None:
    bare, gate = engine(), threading.Event()
    retract(bare, "late", 1, gate)
    waits: list[float] = []
    wait = bare.cache.copies.finish_all

    def finish_all(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return wait(timeout_s)

    bare.cache.copies.finish_all = finish_all  # type: ignore[method-assign]
    for _ in range(3):
        bare.evict(4)
    assert len(waits) == 1
    assert bare.cache.counts["dropped_tokens"] == 12
    gate.set()
