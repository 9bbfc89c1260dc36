"""By how much batches delay the online requests of all engines, whoever starts again."""

from __future__ import annotations

import asyncio

import pytest

from fleet.test_backend import fleet_of, until
from http_lines.live_engine import LiveEngine
from sglang_coserve.fleet.delays import FleetDelays
from sglang_coserve.http_lines.messages import EngineDelays


def test_sums_of_engines_are_added_from_what_they_said_first() -> None:
    delays = FleetDelays()
    assert delays.sums_s() is None
    delays.add("a", EngineDelays("run 1", None))
    assert delays.sums_s() is None
    delays.add("a", EngineDelays("run 1", {"old": 5.0}))
    delays.add("b", EngineDelays("run 2", {"old": 7.0}))
    delays.add("b", EngineDelays("run 2", {"old": 7.5, "new": 1.0}))
    assert delays.sums_s() == {"old": 5.5, "new": 1.0}
    # Predictions err to both sides, so a sum may fall.
    delays.add("b", EngineDelays("run 2", {"old": 7.25, "new": 1.0}))
    assert delays.sums_s() == {"old": 5.25, "new": 1.0}


def test_an_engine_that_was_started_again_counts_from_nothing() -> None:
    delays = FleetDelays()
    delays.add("a", EngineDelays("run 1", {"x": 5.0}))
    delays.add("a", EngineDelays("run 2", {"x": 6.0}))
    assert delays.sums_s() == {"x": 6.0}
    delays.add("b", EngineDelays("run 3", {"y": 1.0}))
    delays.keep({"b"})
    assert delays.sums_s() == {"y": 0.0}


async def test_engines_are_asked_and_one_that_is_gone_is_left_out() -> None:
    a, b = LiveEngine(), LiveEngine()
    async with fleet_of(a, b) as fleet:
        assert await fleet.online_delays_s() is None
        a.backend.delays_s, b.backend.delays_s = {}, {}
        assert await fleet.online_delays_s() == {}
        a.backend.delays_s, b.backend.delays_s = {"x": 1.0}, {"x": 0.5, "y": 2.0}
        assert await fleet.online_delays_s() == {"x": 1.5, "y": 2.0}
        await b.kill()
        a.backend.delays_s = {"x": 1.25}
        async with asyncio.timeout(60):
            assert await fleet.online_delays_s() == pytest.approx({"x": 1.75, "y": 2.0})
        await until(lambda: any(engine.reason for engine in fleet.engines))
