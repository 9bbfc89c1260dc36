"""The cache alone, without a model: what the scheduler's thread spends on checkpoints."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from kv_bench.bare_cache import BareEngine
from kv_bench.rows import new_request
from sglang_coserve.core.kv_checkpoint import CheckpointMode, CheckpointPolicy

__all__ = ["iteration_ms", "reclaim_ms"]

EAGER = CheckpointPolicy(CheckpointMode.EAGER)
RECLAIMED_REQUESTS = 16


def iteration_ms(page_tokens: int, requests: int, steps: int) -> float:
    """Return the mean time that a step of decoding offline requests spends on checkpoints.

    Beginning its copies and taking note of those that have ended; the copies themselves are
    made in another thread. The mean, because with pages of 16 a step copies for some of
    the requests only.
    """
    engine = _decoding(page_tokens, requests, prompt_tokens=32, generated=4, to_come=steps)
    times_ms = []
    for _ in range(steps):
        for req in engine.running:
            assert engine.decode(req)
        times_ms.append(_ms(engine.cache.check_hicache_events) + _ms(engine.checkpoint))
        engine.copy_streams[0].synchronize()
    return statistics.fmean(times_ms)


def reclaim_ms(page_tokens: int, tokens: int) -> float:
    """Return how long it takes to reclaim so many saved tokens of retracted requests."""
    prompt_tokens = tokens // RECLAIMED_REQUESTS - 16
    engine = _decoding(page_tokens, RECLAIMED_REQUESTS, prompt_tokens, generated=32)
    for req in list(engine.running):
        engine.release(req)
    elapsed_ms = _ms(lambda: engine.evict(tokens))
    assert engine.cache.counts["demoted_tokens"] >= tokens
    return elapsed_ms


def _ms(action: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    action()
    return (time.perf_counter() - begin_s) * 1e3


def _decoding(
    page_tokens: int, requests: int, prompt_tokens: int, generated: int, *, to_come: int = 0
) -> BareEngine:
    """Return an engine with so many offline requests that have decoded, all of it saved, and with
    memory for ``to_come`` more tokens of each."""
    tokens = requests * (prompt_tokens + generated + to_come + page_tokens)
    tokens = -(-tokens // page_tokens) * page_tokens
    engine = BareEngine(EAGER, slots=tokens, host_slots=2 * tokens, page_tokens=page_tokens)
    for number in range(requests):
        prompt = [number % 50, *((number * 7 + place) % 50 for place in range(prompt_tokens - 1))]
        assert engine.admit(new_request(f"r{number}", prompt, offline=True))
        engine.checkpoint()
    for _ in range(generated):
        for req in engine.running:
            assert engine.decode(req)
        engine.checkpoint()
        engine.settle()
    return engine
