"""Engines with checkpoints, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from srt.scripted_engine import EngineProcess

PLANNED = {
    "offline_policy": "coserve",
    "startup_profile_seconds": 0.0,
    "slo_ttft_ms": 300.0,
    "slo_tpot_ms": 40.0,
    "safepoint_interval": 0,
}


@pytest.fixture(scope="module")
def start_checkpointing(
    start_engine: Callable[..., EngineProcess],
) -> Callable[..., EngineProcess]:
    """Starts engines by mode, event loop and page size."""

    def start(mode: str, *, coserve: Any = (), **settings: Any) -> EngineProcess:
        return start_engine(coserve={**PLANNED, "kv_checkpoint": mode, **dict(coserve)}, **settings)

    return start
