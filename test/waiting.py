"""Waits for what a test needs, and fails where it does not come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

GIVE_UP_S = 120


def eventually(is_true: Callable[[], object]) -> None:
    """Look again and again until ``is_true``; for tests that have no event loop."""
    give_up_s = time.monotonic() + GIVE_UP_S
    while not is_true():
        assert time.monotonic() < give_up_s, "still waiting"
        time.sleep(0.02)


async def until(is_true: Callable[[], object]) -> None:
    """The same beside other tasks."""
    async with asyncio.timeout(GIVE_UP_S):
        while not is_true():
            await asyncio.sleep(0.002)
