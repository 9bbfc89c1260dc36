"""An engine of a fleet: what it last said, and whether it takes lines."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from enum import Enum
from typing import Final, get_args

from sglang_coserve.config.coserve import Pool
from sglang_coserve.fleet.line_placement.failure_streak import FailureStreak
from sglang_coserve.fleet.routed_engines import RoutedEngines
from sglang_coserve.http_lines.http_engine import HttpEngine
from sglang_coserve.http_lines.messages import (
    EngineLostError,
    EngineRefusesError,
    EngineReport,
)
from sglang_coserve.lines.backend import TokenRate

LINES_AHEAD: Final = 16
"""Lines that wait in an engine beyond the lines that run there. Enough for the engine to choose by
shared prefix, and never to be without a next line between two looks at its load; few enough that
another engine, which is free earlier, can have the rest. It kept engines busy in every run of
``benchmark/fleet_chaos.py``; other numbers were not compared."""

_MOST_PULSE_AGE_S: Final = 5.0
"""Schedulers are asked every second. Those that have said nothing for so long are stuck, as
``/health`` of the engine says."""

_DEAD_S: Final = 20.0
"""An engine that is stuck or does not answer for so long has died, as far as its lines go. Shorter
silences are outages of the network, pauses of a process, or the loading of an adapter."""

_RATE_WINDOW_S: Final = 10.0
"""Online traffic changes the rate of an engine, and the sum changes at once when an engine comes or
goes. Long against the time between two ends of lines."""


class EngineState(Enum):
    """Whether an engine takes lines, and if not, why."""

    UP = "up"
    DOWN = "down"
    """It does not answer."""

    STUCK = "stuck"
    """Its server answers, and its schedulers have not been heard of for some seconds."""

    DRAINING = "draining"
    """It answers, and takes no lines now."""

    FAILING = "failing"
    """It answers, and has failed on several lines in a row: it rests."""

    REFUSING = "refusing"
    """It answers, but not as an engine of ours: a wrong key, or another program."""


class RemoteEngine:
    """An engine and what is known of it.

    What an engine said is worth something only while it is fresh. A stuck engine keeps its report,
    but its counts are not used.
    """

    def __init__(
        self, http: HttpEngine | RoutedEngines, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.http = http
        self._monotonic_s = monotonic_s
        self.state = EngineState.DOWN
        self.reason: str | None = "it was not asked yet"
        """Why it takes no lines; None while it does."""

        self.last_report: EngineReport | None = None
        """Its last report, however old."""

        self.window = LINES_AHEAD
        """Lines that it is to have at a time, while it takes any."""

        self.rate = TokenRate(monotonic_s, _RATE_WINDOW_S)
        self.streak = FailureStreak()
        self.lines_served = 0
        self.lines_lost = 0
        """Attempts that ended with the engine."""

        self.noted_run: str | None = None
        """The run whose predecessors are known to have ended."""

        self._alive_s = monotonic_s()
        """When it was last known to work."""

        self._looking = asyncio.Lock()
        self._looked_s = -math.inf
        """When the last look began that was finished."""

    @property
    def url(self) -> str:
        """Its address, which is also its name."""
        return self.http.url

    @property
    def run(self) -> str | None:
        """The run of the engine that answered last; None before any."""
        return None if self.last_report is None else self.last_report.run

    @property
    def model(self) -> str | None:
        """The model that it had last; None if it was never asked."""
        return None if self.last_report is None else self.last_report.model

    @property
    def pool(self) -> Pool | None:
        """The pool that it was of last."""
        named = None if self.last_report is None else self.last_report.pool
        return next((pool for pool in get_args(Pool) if pool == named), None)

    @property
    def models(self) -> tuple[str, ...]:
        """Names that lines could ask it for last: its model's, then its adapters'."""
        return () if self.last_report is None else self.last_report.models

    @property
    def is_up(self) -> bool:
        """True while it takes lines."""
        return self.state is EngineState.UP

    @property
    def answers(self) -> bool:
        """True if it was heard of in the last look, its schedulers included."""
        return self.state not in (EngineState.DOWN, EngineState.STUCK, EngineState.REFUSING)

    @property
    def is_dead(self) -> bool:
        """True if it has been stuck, or has not answered, for so long that its lines go on in other
        engines."""
        is_silent = self.state in (EngineState.DOWN, EngineState.STUCK)
        return is_silent and self._monotonic_s() - self._alive_s >= _DEAD_S

    def set_state(self, state: EngineState, reason: str | None) -> None:
        """Note whether it takes lines; ``look`` finds out when that changes back."""
        self.state, self.reason = state, reason

    async def look(self) -> bool:
        """Ask the engine how it is, and note the answer; return True.

        All who call at a time share one look that began after they had called. It is False to all
        of them but one.
        """
        now_s = asyncio.get_running_loop().time
        called_s = now_s()
        async with self._looking:
            if self._looked_s >= called_s:
                return False
            began_s = now_s()
            await self._look()
            self._looked_s = began_s
            return True

    async def _look(self) -> None:
        try:
            report = await self.http.report()
        except EngineLostError as error:
            self.set_state(EngineState.DOWN, str(error))
        except EngineRefusesError as error:
            self.set_state(EngineState.REFUSING, str(error))
        else:
            self._take(report)

    def _take(self, report: EngineReport) -> None:
        now_s = self._monotonic_s()
        if self.last_report is None:
            expected_per_s = report.expected_tokens_per_s
            self.rate = TokenRate(self._monotonic_s, _RATE_WINDOW_S, expected_per_s)
        self.last_report = report
        if report.pulse_age_s > _MOST_PULSE_AGE_S:
            silence = f"nothing was heard of its schedulers for {report.pulse_age_s:.0f} s"
            self.set_state(EngineState.STUCK, silence)
            return
        self._alive_s = now_s
        self.window = line_window(report)
        if self.streak.is_resting(now_s):
            self.set_state(EngineState.FAILING, self.reason)
        elif report.refuses is not None:
            self.set_state(EngineState.DRAINING, report.refuses)
        else:
            self.set_state(EngineState.UP, None)


def line_window(report: EngineReport) -> int:
    """Return how many lines an engine is to have: the lines that run, and ``LINES_AHEAD``.

    An engine that has much to do for others gets fewer lines of us, and at least one, so that every
    job goes on. Lines of which the engine's schedulers do not know yet count as waiting.
    """
    if report.most_lines is not None:
        return report.most_lines
    running = min(report.lines - report.waiting, report.running)
    return max(1, running + LINES_AHEAD)
