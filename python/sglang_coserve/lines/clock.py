"""The clock, passed in so that tests can control time."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """The time functions that the line engine uses."""

    def now_s(self) -> float:
        """Return seconds since the epoch."""

    async def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``; not at all when negative."""


class SystemClock:
    """The system clock."""

    def now_s(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``; not at all when negative."""
        await asyncio.sleep(max(0.0, seconds))
