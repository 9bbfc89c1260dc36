"""A line that a fleet serves, and its attempts."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sglang_coserve.fleet.engine import RemoteEngine
from sglang_coserve.lines.backend import LineRequest, LineResult, MovedKv


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt at a line in one engine.

    ``line.attempt is attempt`` says that the attempt still counts. It does not once the engine's
    death was noted: the line waits for another attempt, or has it already.
    """

    engine: RemoteEngine
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    run: str | None = None
    """The run of the engine that has the line; None before the engine has answered."""

    limit: asyncio.Timeout | None = None
    """Ends the attempt, while it is made, once the engine has died without a word."""


@dataclass(slots=True, eq=False)
class FleetLine:
    """A line that is being served."""

    number: int
    request: LineRequest
    on_tokens: Callable[[Sequence[int]], None]
    model: str
    """The model of its tokens."""

    asked: str | None
    """The name of the model or adapter that it asks for; None if any engine will do."""

    generated: list[int]
    kv: MovedKv | None = None
    attempt: Attempt | None = None
    """The attempt that is being made, or is to be made next; None while the line waits."""

    verdict: LineResult | None = None
    """The result of a line that the fleet has given up."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when ``attempt`` or ``verdict`` is."""

    deaths: list[str] = field(default_factory=list)
    """Reasons given for the deaths of engines that had the line."""

    setbacks: int = 0
    """Attempts in a row that have brought no token and no answer."""

    async def next_attempt(self) -> Attempt | None:
        """Wait for the next attempt; None once there is a verdict."""
        while self.attempt is None and self.verdict is None:
            self.changed.clear()
            await self.changed.wait()
        return self.attempt

    def end(self, verdict: LineResult) -> None:
        """Give the line up."""
        self.verdict = verdict
        self.changed.set()
