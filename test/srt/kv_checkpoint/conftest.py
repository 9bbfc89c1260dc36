"""Engines with checkpoints, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from srt.kv_checkpoint.checkpoint_engine import CheckpointEngine, checkpoint_spec
from srt.scripted_engine import EngineSpec

PLANNED = {
    "offline_policy": "coserve",
    "startup_profile_seconds": 0.0,
    "slo_ttft_ms": 300.0,
    "slo_tpot_ms": 40.0,
    "safepoint_interval": 0,
}


@pytest.fixture(scope="module")
def start_checkpointing(small_model: Path) -> Iterator[Callable[..., CheckpointEngine]]:
    """Starts engines by mode, event loop and page size; ends them with the module."""
    running: dict[EngineSpec, CheckpointEngine] = {}

    def start(
        mode: str, *, overlap: bool, page_size: int, coserve: Any = (), **server_args: Any
    ) -> CheckpointEngine:
        settings = {**PLANNED, "kv_checkpoint": mode, **dict(coserve)}
        spec = checkpoint_spec(
            small_model, settings, overlap=overlap, page_size=page_size, **server_args
        )
        if spec not in running or not running[spec].is_alive:
            running[spec] = CheckpointEngine(spec)
        return running[spec]

    yield start
    for process in running.values():
        process.close()
