"""Engines behind the documentation's nginx: lines pass as they do without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from batch.scripted_backend import answer
from fleet.live_nginx import NEEDS_NGINX, running_nginx
from fleet.test_backend import Lines, finish_all, request
from http_lines.live_engine import ADMIN_KEY, LiveEngine
from sglang_coserve.fleet.backend import FleetBackend
from sglang_coserve.lines.backend import LineRequest
from waiting import until

CONFIG = Path(__file__).parents[2] / "docs" / "examples" / "engine-nginx.conf"

pytestmark = NEEDS_NGINX


@asynccontextmanager
async def behind_nginx(
    directory: Path, *more: str
) -> AsyncGenerator[tuple[LiveEngine, FleetBackend]]:
    """An engine behind nginx, and a fleet that knows nginx's address alone.

    ``more`` are settings of nginx beside the documentation's.
    """
    async with LiveEngine() as engine:
        place = "proxy_pass http://engine:30000;"
        proxied = f"proxy_pass {engine.url}; {' '.join(more)}"
        async with (
            running_nginx(directory, CONFIG.read_text(), {place: proxied}) as url,
            FleetBackend(ADMIN_KEY, look_interval_s=0.02) as fleet,
        ):
            fleet.engines.set_listed([url])
            await until(lambda: fleet.model)
            yield engine, fleet


async def test_lines_are_answered_and_their_tokens_come_as_they_are_made(tmp_path: Path) -> None:
    async with behind_nginx(tmp_path) as (engine, fleet):
        served = Lines(fleet, [f"line {n}" for n in range(12)])
        await engine.holds(12)
        for step in (1, 2):
            for entry in engine.backend.in_flight:
                entry.generate(1)
            await until(lambda: all(len(h) == step for h in served.heard.values()))  # noqa: B023
        finish_all(engine)
        results = await served.results()
        assert all(results[name] == answer(request(name)) for name in results)
        assert set(fleet.ends.values()) == {0}


async def test_a_line_of_megabytes_passes(tmp_path: Path) -> None:
    async with behind_nginx(tmp_path) as (engine, fleet):
        line = LineRequest("b", 1, "/v1/completions", {"prompt": "a", "note": "x" * (3 << 20)})
        serving = asyncio.ensure_future(fleet.run(line, lambda _: None))
        await engine.holds(1)
        finish_all(engine)
        assert (await serving).is_ok


async def test_a_line_without_tokens_for_long_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nginx cuts an answer that is silent for a minute. Here it is a second, and so is the pause
    between two signs of life."""
    monkeypatch.setattr("sglang_coserve.http_lines.line_server.HEARTBEAT_S", 0.2)
    async with behind_nginx(tmp_path, "proxy_read_timeout 1s;") as (engine, fleet):
        served = Lines(fleet, ["slow"])
        await engine.holds(1)
        await asyncio.sleep(3)
        finish_all(engine)
        assert (await served.results())["slow"].is_ok
        assert set(fleet.ends.values()) == {0}


async def test_a_line_that_is_cancelled_ends_in_the_engine(tmp_path: Path) -> None:
    async with behind_nginx(tmp_path) as (engine, fleet):
        served = Lines(fleet, ["unwanted"])
        await engine.holds(1)
        served.tasks["unwanted"].cancel()
        await engine.holds(0)


async def test_an_engine_that_drains_behind_nginx_gives_its_lines_back(tmp_path: Path) -> None:
    async with behind_nginx(tmp_path) as (engine, fleet):
        served = Lines(fleet, ["a", "b"])
        await engine.holds(2)
        engine.lines.close("it drains")
        await until(lambda: fleet.ends["moved"] == 2)
        await engine.holds(0)
        engine.lines.open()
        await engine.holds(2)
        finish_all(engine)
        assert all(result.is_ok for result in (await served.results()).values())
