"""Reclaiming what is still being copied: it is waited for, but not for a copy that hangs."""

from __future__ import annotations

import threading
from importlib.metadata import version
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.srt import compat
from sglang_coserve.srt.compat.versions import module_for
from sglang_coserve.srt.kv_checkpoint.checkpoint_tree import subtree
from sglang_coserve.srt.kv_checkpoint.reclaim import reclaim_tokens
from sglang_coserve.srt.kv_checkpoint.strategies import Eager
from srt.kv_checkpoint.bare_cache import BareEngine, new_request

PROMPT_TOKENS = 40


def engine() -> BareEngine:
    engine = BareEngine(Eager(), slots=64, host_slots=256, page_tokens=4)
    engine.cache.reclaimer.least_tokens = 1
    return engine


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


@given(st.integers(1, 10_000), st.integers(0, 512), st.sampled_from([1, 16, 64]))
def test_reclaim_takes_whole_pages_and_at_least_a_chunk(wanted: int, least: int, page: int) -> None:
    tokens = reclaim_tokens(wanted, least, page)
    assert tokens % page == 0
    assert max(wanted, least) <= tokens < max(wanted, least) + page


def test_asking_what_is_cached_changes_nothing() -> None:
    """As planning does, of many that are not taken: what is older is still evicted first."""
    made = engine()
    retract(made, "a", 1)
    made.settle()
    tree = made.cache.tree_core
    prompt = [1] * (PROMPT_TOKENS // 2) + [2] * PROMPT_TOKENS

    def state() -> list[Any]:
        return [(node.id, node.last_access_time, len(node.key)) for node in subtree(tree.root_node)]

    before = state()
    asked = new_request("b", prompt, offline=True)
    cached_tokens = compat.cached_prefix_tokens(made.cache, asked)
    if module_for(version("sglang")) != "v17":
        assert state() == before
    asked.init_next_round_input(made.cache)
    assert 0 < cached_tokens == compat.prefix_tokens(asked)
