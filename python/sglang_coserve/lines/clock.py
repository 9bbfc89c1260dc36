"""The clock of the line engine: tests give it another one."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """The system clock."""

    def now_s(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``; not at all when negative."""
        await asyncio.sleep(max(0.0, seconds))
