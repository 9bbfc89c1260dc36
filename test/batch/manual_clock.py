"""Time that passes when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from sglang_coserve.lines.background import Clock

REAL_LIMIT_S = 60.0
STEP_S = 0.05


class ManualClock(Clock):
    """A clock of the Batch API. Threads and processes take real time, so waits poll."""

    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self.step_s = STEP_S
        """What passes between two looks; less of it while what is waited for takes real time."""

        self._now_s = now_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    def now_s(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        heappush(self._sleepers, (self._now_s + seconds, next(self._order), woken))
        await woken

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass and wake whoever slept that long."""
        self._now_s += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now_s:
            woken = heappop(self._sleepers)[2]
            if not woken.done():
                woken.set_result(None)

    async def until(self, is_true: Callable[[], bool], what: str = "") -> None:
        """Let time pass in small steps until ``is_true``; fails after a minute of real time."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + REAL_LIMIT_S
        while not is_true():
            assert loop.time() < give_up_s, f"still waiting: {what or is_true}"
            await asyncio.sleep(0.001)
            self.advance(self.step_s)
