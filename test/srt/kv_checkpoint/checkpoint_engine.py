"""A scripted engine with checkpoints, which are checked after every batch."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.srt import compat
from sglang_coserve.srt.kv_checkpoint.settings import register_cache, server_settings
from srt import scripted_engine
from srt.scripted_engine import EngineProcess, EngineSpec


class CheckpointEngine(EngineProcess):
    """A process with one such scheduler."""

    def __init__(self, spec: EngineSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, spec), daemon=True)
        self._process.start()
        remote.close()
        self._receive(f"start of {spec}")


def checkpoint_spec(
    model: Any, coserve: dict[str, Any], *, overlap: bool, **server_args: Any
) -> EngineSpec:
    """Return what to start: a small KV pool, so that offline requests are evicted all the time."""
    settings = {
        "max_total_tokens": 1024,
        "chunked_prefill_size": 128,
        "schedule_conservativeness": 0.1,
        **server_settings(CoserveConfig(**coserve), on_cpu=True),
        **server_args,
    }
    return EngineSpec(
        model,
        overlap=overlap,
        server_args=tuple(sorted(settings.items())),
        coserve=tuple(coserve.items()),
    )


def _checking(base: type) -> type:
    class CheckingScheduler(base):  # type: ignore[valid-type,misc]
        def process_batch_result(self, batch: Any, result: Any) -> None:
            super().process_batch_result(batch, result)
            self.tree_cache.assert_consistent()
            for checkpoint in self.tree_cache._saver.checkpoints.values():
                _assert_saved(self.tree_cache, checkpoint)

    return CheckingScheduler


def _assert_saved(cache: Any, checkpoint: Any) -> None:
    """What counts as saved is the KV that the request has on the device, and nothing is sent that
    is not computed."""
    page, start = cache.page_size, checkpoint.start_tokens
    assert start + checkpoint.pages.sent * page <= compat.computed_tokens(checkpoint.req)
    end = checkpoint.saved_end_tokens
    device_slots = cache.req_to_token_pool.req_to_token[
        compat.slot_of(checkpoint.req), start:end
    ].tolist()
    host_slots = list(checkpoint.host_slots[: end - start])
    device, host = cache.token_to_kv_pool_allocator.get_kvcache(), cache.host_pool
    for layer in range(device.layer_num):
        for on_device, on_host in (
            (device.k_buffer, host.k_buffer),
            (device.v_buffer, host.v_buffer),
        ):
            assert on_device[layer][device_slots].equal(on_host[layer][host_slots])


def _serve(connection: Any, spec: EngineSpec) -> None:
    from sglang_coserve.srt.cpu import defaults as cpu

    os.environ["SGLANG_CHECK_KV_PAGE_INVARIANTS"] = "1"
    cpu.set_environment_defaults()
    register_cache(CoserveConfig(**dict(spec.coserve)), on_cpu=True)
    scripted_engine.serve(connection, spec, _checking)
