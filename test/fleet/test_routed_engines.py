"""A router in the place of engines, which places lines and says nothing of them before the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from batch.scenarios import OWNER, lines, stream, wanted
from fleet.test_backend import request
from http_lines.live_engine import LiveApp
from sglang_coserve.batch.service import BatchService
from sglang_coserve.errors import ConfigError
from sglang_coserve.fleet.backend import FleetBackend
from sglang_coserve.fleet.engine import EngineState
from sglang_coserve.fleet.options import parse_options
from sglang_coserve.fleet.routed_engines import KEY_VARIABLE, RoutedEngines
from sglang_coserve.lines.backend import FailureKind, LineRequest
from waiting import until

KEY = "router's key"


class Router(LiveApp):
    """Answers as it is told, and keeps what it got."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.add_api_route("/v1/models", self._models)
        self.app.add_api_route("/v1/completions", self._complete, methods=["POST"])
        self.models = ["small", "sql"]
        self.statuses: list[int] = []
        """Statuses of the next answers; 200 then."""

        self.seen: list[tuple[dict[str, str], Any]] = []
        self.holds = asyncio.Event()
        self.holds.set()
        self.num_running = self.most_running = self.num_asked = 0
        super().__init__(self.app)

    async def _models(self, request: Request) -> JSONResponse:
        self.num_asked += 1
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": "no"}, 401)
        return JSONResponse({"data": [{"id": name} for name in self.models]})

    async def _complete(self, request: Request) -> JSONResponse:
        self.seen.append((dict(request.headers), await request.json()))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await self.holds.wait()
        self.num_running -= 1
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return JSONResponse({"error": {"message": "busy"}}, status)
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        return JSONResponse({"id": "c", "choices": [{"text": "x"}], "usage": usage})


@asynccontextmanager
async def routed(
    *, key: str = KEY, most_lines: int = 8
) -> AsyncGenerator[tuple[Router, FleetBackend]]:
    async with Router() as router:
        engines = RoutedEngines(router.url, key, most_lines)
        async with FleetBackend("", routers=[engines], look_interval_s=0.02) as fleet:
            fleet.engines.set_listed([engines.url])
            yield router, fleet


async def test_a_batch_goes_through_a_router_with_its_class_and_deadline(tmp_path: Path) -> None:
    async with routed() as (router, fleet):
        await fleet.engines.ready()
        assert fleet.model_names == ("small", "sql")
        async with await BatchService.open(tmp_path / "data", fleet) as service:
            file = await service.create_file(OWNER, "in.jsonl", stream(lines(40)))
            batch = await service.create_batch(OWNER, wanted(file))
            async with asyncio.timeout(30):
                while batch.status != "completed":
                    await asyncio.sleep(0.02)
                    batch = await service.retrieve_batch(OWNER, batch.id)
        assert batch.request_counts.completed == 40
        assert {body["service_tier"] for _, body in router.seen} == {"flex"}
        left_s = [headers["x-llm-d-inference-ttl"] for headers, _ in router.seen]
        assert all(each.endswith("s") and 0 < int(each[:-1]) <= 86_400 for each in left_s)


async def test_a_router_has_no_more_lines_than_it_may() -> None:
    async with routed(most_lines=5) as (router, fleet):
        await fleet.engines.ready()
        router.holds.clear()
        tasks = [
            asyncio.ensure_future(fleet.run(request(f"{n}"), lambda _: None)) for n in range(20)
        ]
        await until(lambda: router.num_running == 5)
        router.holds.set()
        assert all(result.is_ok for result in await asyncio.gather(*tasks))
        assert router.most_running == 5


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (429, FailureKind.UNAVAILABLE),
        (503, FailureKind.UNAVAILABLE),
        (502, FailureKind.LOST),
        (504, FailureKind.TIMED_OUT),
        (500, FailureKind.FAILED),
    ],
)
async def test_a_failure_behind_the_router_is_an_attempt_of_the_line(
    status: int, kind: FailureKind
) -> None:
    """Nobody knows which engine it was, so the line may be at fault; others go on."""
    async with routed() as (router, fleet):
        await fleet.engines.ready()
        router.statuses = [status]
        result = await fleet.run(request(), lambda _: None)
        assert (result.status_code, result.is_retryable, result.kind) == (status, True, kind)
        assert all(engine.is_up for engine in fleet.engines)
        assert (await fleet.run(request(), lambda _: None)).is_ok


@pytest.mark.parametrize("asked", [None, "default", "small"])
async def test_a_line_without_a_model_gets_the_only_one(asked: str | None) -> None:
    async with routed() as (router, fleet):
        router.models = ["small"]
        await fleet.engines.ready()
        line = LineRequest("b", 1, "/v1/completions", {"prompt": "a", "model": asked})
        assert (await fleet.run(line, lambda _: None)).is_ok
        assert router.seen[0][1]["model"] == "small"


async def test_models_in_another_order_are_the_same_models() -> None:
    async with routed() as (router, fleet):
        await fleet.engines.ready()
        changes: list[None] = []
        fleet.when_changing(lambda: changes.append(None))
        router.models.reverse()
        num_asked = router.num_asked
        await until(lambda: router.num_asked > num_asked + 3)
        assert not changes


async def test_a_router_that_shows_its_models_and_refuses_lines_rests() -> None:
    async with routed() as (router, fleet):
        await fleet.engines.ready()
        (engine,) = fleet.engines
        router.statuses = [401] * 1000
        serving = asyncio.ensure_future(fleet.run(request(), lambda _: None))
        await until(lambda: engine.state is EngineState.FAILING)
        assert KEY_VARIABLE in str(engine.reason)
        num_asked = router.num_asked
        await until(lambda: router.num_asked > num_asked + 10)
        assert len(router.seen) == 1
        serving.cancel()
        await asyncio.wait({serving})


async def test_a_router_may_refuse_a_single_line() -> None:
    async with routed() as (router, fleet):
        await fleet.engines.ready()
        router.statuses = [200, 403]
        assert (await fleet.run(request("good"), lambda _: None)).is_ok
        refused = await fleet.run(request("not yours"), lambda _: None)
        assert (refused.status_code, refused.is_retryable) == (403, False)
        assert all(engine.is_up for engine in fleet.engines)


async def test_a_wrong_key_is_told() -> None:
    async with routed(key="guess") as (_, fleet):
        (engine,) = fleet.engines
        await until(lambda: engine.state is EngineState.REFUSING)
        assert "401" in str(engine.reason)


def test_a_gateway_has_engines_or_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    data = ("--coserve-data-dir", "data")
    assert parse_options(("--router", "http://r:1", *data)).sources == []
    with pytest.raises(ConfigError, match="--router"):
        parse_options(("--router", "http://r:1", "--engine", "http://e:1", *data))
    with pytest.raises(ConfigError, match="--router-max-lines"):
        parse_options(("--router", "http://r:1", "--router-max-lines", "0", *data))
    with pytest.raises(ConfigError, match="no engines"):
        parse_options(data)
