"""A scripted engine with checkpoints, whose host memory is checked after every batch."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from sglang_coserve.config import CoserveConfig
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
    """Return what to start: a small KV pool, so that offline rows are evicted all the time."""
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

    return CheckingScheduler


def _serve(connection: Any, spec: EngineSpec) -> None:
    from sglang_coserve.srt import cpu, processes

    os.environ["SGLANG_CHECK_KV_PAGE_INVARIANTS"] = "1"
    cpu.set_environment_defaults()
    scheduler_class = processes.scheduler_class
    processes.scheduler_class = lambda args: _checking(scheduler_class(args))
    register_cache(CoserveConfig(**dict(spec.coserve)), on_cpu=True)
    scripted_engine._serve(connection, spec)
