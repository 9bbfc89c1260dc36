"""The cache alone: how fast KV leaves the device, is given up, and comes back."""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

from gpu.kv_engine import KvEngine

__all__ = ["bandwidth", "reclaim", "resume", "step"]

_GENERATED_TOKENS: Final = 32
"""The last tokens of each request that is reclaimed."""


def bandwidth(engine: KvEngine, tokens: int, repeats: int) -> dict[str, Any]:
    """Return GB/s of one checkpoint of a request, from its call until the copy has ended."""
    per_s, page = [], engine.shape.page_tokens
    tokens = tokens // page * page
    for _ in range(repeats):
        engine.clear()
        engine.admit(tokens)
        engine.synchronize()
        began_s = time.perf_counter()
        copied = engine.checkpoint()
        engine.copy_streams[0].synchronize()
        took_s = time.perf_counter() - began_s
        assert copied == tokens, f"{copied} of {tokens} tokens were copied"
        per_s.append(copied * engine.shape.bytes_per_token / took_s / 1e9)
    return {"tokens": tokens, "gb_per_s": statistics.median(per_s), "all_gb_per_s": per_s}


def step(engine: KvEngine, requests: int, steps: int, new_tokens: int) -> dict[str, Any]:
    """Return what decode steps of so many offline requests spend, each with ``new_tokens`` more.

    ``host_ms`` is the mean time of the scheduler's thread, to take note of copies that have ended
    and to begin some; ``copy_ms`` the median until these have ended.
    """
    engine.clear()
    page = engine.shape.page_tokens
    for _ in range(requests):
        engine.admit(16 * page)
    engine.checkpoint()
    engine.settle()
    host_ms, copy_ms, copied = [], [], 0
    for _ in range(steps):
        for req in engine.running:
            engine.grow(req, new_tokens)
        engine.synchronize()
        began_s = time.perf_counter()
        engine.cache.check_hicache_events()
        copied += engine.checkpoint()
        host_ms.append((time.perf_counter() - began_s) * 1e3)
        engine.copy_streams[0].synchronize()
        copy_ms.append((time.perf_counter() - began_s) * 1e3)
    gigabytes = copied * engine.shape.bytes_per_token / 1e9
    return {
        "rows": requests,
        "tokens": copied / steps,  # Few ones are gathered over some steps.
        # The mean: with less than a page of new tokens a step copies for some of them only.
        "host_ms": statistics.fmean(host_ms),
        "copy_ms": statistics.median(copy_ms),
        "gb_per_s": gigabytes / sum(copy_ms) * 1e3,
    }


def reclaim(engine: KvEngine, tokens: int, requests: int, repeats: int) -> dict[str, Any]:
    """Return how long it takes to take the slots of saved, released requests."""
    page = engine.shape.page_tokens
    request_tokens = -(-tokens // requests // page) * page
    times_ms, release_ms = [], []
    for _ in range(repeats):
        engine.clear()
        for _ in range(requests):
            engine.grow(engine.admit(request_tokens), _GENERATED_TOKENS)
        while engine.checkpoint():  # A step begins some of the copies.
            engine.settle()
        for req in list(engine.running):
            began_s = time.perf_counter()
            engine.release(req)
            release_ms.append((time.perf_counter() - began_s) * 1e3)
        before = engine.cache.counts["demoted_tokens"]
        engine.synchronize()
        began_s = time.perf_counter()
        engine.evict(tokens)
        engine.synchronize()
        times_ms.append((time.perf_counter() - began_s) * 1e3)
        taken = engine.cache.counts["demoted_tokens"] - before
        assert taken >= tokens, f"{taken} of {tokens} tokens were reclaimed without loss"
    return {
        "tokens": tokens,
        "rows": requests,
        "ms": statistics.median(times_ms),
        "most_ms": max(times_ms),
        "release_of_a_row_ms": statistics.median(release_ms),
    }


def resume(engine: KvEngine, tokens: int, budget_tokens: int, repeats: int) -> dict[str, Any]:
    """Return how long it takes to load a preempted request, ``budget_tokens`` a pass, and whether
    its KV is what it was."""
    times_ms, is_equal = [], True
    tokens = tokens // engine.shape.page_tokens * engine.shape.page_tokens
    for _ in range(repeats):
        engine.clear()
        req = engine.admit(tokens)
        slots = engine.slots(req, tokens)
        before = engine.device_kv(slots).clone()
        engine.checkpoint()
        engine.settle()
        engine.release(req)
        engine.evict(tokens)
        # What others would write there.
        for buffer in (*engine.kv.k_buffer, *engine.kv.v_buffer):
            buffer[slots] = 0
        engine.synchronize()
        began_s = time.perf_counter()
        engine.load(req, budget_tokens)
        engine.synchronize()
        times_ms.append((time.perf_counter() - began_s) * 1e3)
        cached = engine.cached_slots(req)
        assert len(cached) == tokens, f"{len(cached)} tokens came back"
        is_equal &= bool((engine.device_kv(cached) == before).all())
    took_ms = statistics.median(times_ms)
    gigabytes = tokens * engine.shape.bytes_per_token / 1e9
    return {
        "tokens": tokens,
        "tokens_a_pass": budget_tokens,
        "ms": took_ms,
        "gb_per_s": gigabytes / took_ms * 1e3,
        "is_equal": is_equal,
    }
