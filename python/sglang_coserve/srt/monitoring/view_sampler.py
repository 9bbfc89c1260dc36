"""Samples what the schedulers say of themselves, once a second, for as long as the server runs."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from sglang_coserve.srt.monitoring.scheduler_query import STANDING, ask
from sglang_coserve.view import History

__all__ = ["sample"]

_INTERVAL_S: Final = 1.0


async def sample(manager: Any, history: History) -> None:
    """Let ``history`` follow the schedulers of SGLang's tokenizer ``manager``; for a task.

    A scheduler that does not answer is waited for: the age of the last sample shows it.
    """
    while True:
        states = await ask(manager, STANDING)
        history.add(time.time(), states)
        await asyncio.sleep(_INTERVAL_S)
