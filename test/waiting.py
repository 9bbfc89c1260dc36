"""Waits for what a test needs, and fails where it does not come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
GIVE_UP_S = 120


def eventually(look: Callable[[], T], within_s: float = GIVE_UP_S) -> T:
    """Look again and again until there is something; for tests that have no event loop."""
    give_up_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < give_up_s, "still waiting"
        time.sleep(0.02)
    return found


async def until(is_true: Callable[[], object]) -> None:
    """The same beside other tasks."""
    async with asyncio.timeout(GIVE_UP_S):
        while not is_true():
            await asyncio.sleep(0.002)
