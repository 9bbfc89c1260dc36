"""Samples what the schedulers say of themselves, once a second, for as long as the server runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

from sglang_coserve.srt.monitoring.scheduler_query import STANDING, ask
from sglang_coserve.view import History

__all__ = ["sampled"]

_INTERVAL_S: Final = 1.0

logger = logging.getLogger(__name__)


@asynccontextmanager
async def sampled(manager: Any, history: History) -> AsyncGenerator[None]:
    """Within it, ``history`` follows the schedulers of SGLang's tokenizer ``manager``."""
    task = asyncio.create_task(_sample(manager, history))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _sample(manager: Any, history: History) -> None:
    """A scheduler that does not answer is waited for: the age of the last sample shows it."""
    has_failed = False
    while True:
        try:
            states = await ask(manager, STANDING)
            history.add(time.time(), states)
            has_failed = False
        except Exception:
            if not has_failed:
                logger.exception("the schedulers could not be sampled for /coserve/view")
            has_failed = True
        await asyncio.sleep(_INTERVAL_S)
