"""What copies do to a decode step beside them, and a write that may come too late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from gpu.kv_engine import KvEngine
from gpu.layer_stack import decoder_layers, device_ms

__all__ = ["decode_interference", "late_write"]

_REQUESTS: Final = 64
_STEPS: Final = 24
"""The pool holds what they add, with pages of 16 tokens too."""

_SLEEP_CYCLES: Final = 40_000_000
"""About 20 ms of the GPU: longer than a load."""


class DecodeStep:
    """The matrix products of the model's layers for 64 requests, as one CUDA graph."""

    def __init__(self, model_path: Path) -> None:
        layers = decoder_layers(model_path)
        x = torch.randn(_REQUESTS, layers[0].hidden, device="cuda", dtype=torch.bfloat16)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            for _ in range(2):
                for layer in layers:
                    layer(x)
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph):
                y = x
                for layer in layers:
                    y = layer(y)

    def ms(self, before: Callable[[], object] = lambda: None) -> float:
        """Return the device's median time for a step; ``before`` is called before each."""
        return device_ms(
            lambda _: self._graph.replay(), range(_STEPS), skipped=_STEPS // 4, before=before
        )


def decode_interference(engine: KvEngine, model_path: Path) -> dict[str, Any]:
    """Return decode steps alone, beside the copies of a step, and beside copies that
    never pause."""
    step = DecodeStep(model_path)
    page = engine.shape.page_tokens
    alone_ms = step.ms()
    engine.clear()
    for _ in range(_REQUESTS):
        engine.admit(16 * page)
    engine.checkpoint()
    engine.settle()

    def one_iteration() -> None:
        for req in engine.running:
            engine.grow(req, page)
        engine.cache.check_hicache_events()
        engine.checkpoint()

    beside_iteration_ms = step.ms(one_iteration)
    engine.clear()
    # The host pool holds so many copies of one request's KV: no step waits for an end.
    req = engine.admit(4096)
    slots = engine.slots(req, 4096)
    host_slots = engine.cache.host_pool.alloc(4096)
    controller, stream = engine.cache.cache_controller, engine.cache.cache_controller.write_stream
    host, device = controller.move_indices(host_slots, slots)

    def bulk() -> None:
        with torch.cuda.stream(stream):
            controller.mem_pool_host.backup_from_device_all_layer(
                controller.mem_pool_device, host, device, controller.io_backend
            )

    beside_bulk_ms = step.ms(bulk)
    torch.cuda.synchronize()
    engine.cache.host_pool.free(host_slots)
    return {
        "rows": _REQUESTS,
        "alone_ms": alone_ms,
        "beside_iteration_ms": beside_iteration_ms,
        "iteration_share": beside_iteration_ms / alone_ms - 1.0,
        "beside_bulk_ms": beside_bulk_ms,
        "bulk_share": beside_bulk_ms / alone_ms - 1.0,
    }


def late_write(engine: KvEngine, trials: int, *, is_ordered: bool) -> dict[str, Any]:
    """Return how often KV that was loaded is overwritten by a pass that was launched before.

    As under overlap scheduling: a pass on a stream of its own still has to write the KV
    of a token whose page is freed, given to a load and filled meanwhile. ``is_ordered``:
    the scheduler's stream waits for the pass first, which must give 0.
    """
    page = engine.shape.page_tokens
    # One request fills the pool: what it gives up is what the load gets.
    tokens = min(engine.shape.slots, engine.shape.context - page) // page * page
    forward = torch.cuda.Stream()
    corrupted = 0
    for _ in range(trials):
        engine.clear()
        req = engine.admit(tokens)
        slots = engine.slots(req, tokens)
        engine.checkpoint()
        engine.settle()
        before = engine.device_kv(slots).clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(forward):
            torch.cuda._sleep(_SLEEP_CYCLES)
            for buffer in (*engine.kv.k_buffer, *engine.kv.v_buffer):
                buffer[slots] = 7.0
        if is_ordered:
            torch.cuda.current_stream().wait_stream(forward)
        engine.release(req)
        engine.evict(len(slots))
        engine.load(req, len(slots))
        torch.cuda.synchronize()
        engine.cache.check_hicache_events()
        found = engine.device_kv(engine.cached_slots(req))
        corrupted += not torch.equal(found, before)
    return {"trials": trials, "corrupted": corrupted, "is_ordered": is_ordered}
