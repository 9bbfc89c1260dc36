"""Engines with checkpoints, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from srt.scripted_engine import EngineProcess
from srt.test_planned_scheduler import LOOSE

PLANNED = {**LOOSE, "safepoint_interval": 0}


@pytest.fixture(scope="module")
def start_checkpointing(
    start_engine: Callable[..., EngineProcess],
) -> Callable[..., EngineProcess]:
    """Starts engines by mode, event loop and page size."""

    def start(mode: str, *, coserve: Any = (), **settings: Any) -> EngineProcess:
        return start_engine(coserve={**PLANNED, "kv_checkpoint": mode, **dict(coserve)}, **settings)

    return start
