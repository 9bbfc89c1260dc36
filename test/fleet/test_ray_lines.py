"""What an actor of a Ray job does with its lines, on engines behind real sockets."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import HTTPException

from batch.scripted_backend import ENDPOINT, ScriptedBackend, answer
from fleet.test_backend import GIVE_UP_S, request
from http_lines.live_engine import ADMIN_KEY, LiveEngine
from sglang_coserve.errors import ConfigError, MissingExtraError, ServerGoneError
from sglang_coserve.fleet.discovery import EngineList, EngineSource
from sglang_coserve.http_lines.messages import EngineReport
from waiting import until

pytest.importorskip("ray")
from sglang_coserve.ray import complete
from sglang_coserve.ray.fleet_lines import Answer, FleetLines


def text(name: str, **fields: Any) -> bytes:
    body = request(name).body
    line = {"custom_id": name, "method": "POST", "url": ENDPOINT, "body": body, **fields}
    return json.dumps(line).encode()


def lines_on(
    *engines: LiveEngine, admin_key: str = ADMIN_KEY, no_engine_timeout_s: float = GIVE_UP_S
) -> FleetLines:
    source = EngineList(engine.url for engine in engines)
    return FleetLines(source, admin_key, job="job", no_engine_timeout_s=no_engine_timeout_s)


async def answered(lines: FleetLines, *contents: bytes | None) -> Sequence[Answer]:
    async with asyncio.timeout(GIVE_UP_S):
        return await lines.answers(contents)


async def test_every_line_has_its_answer_or_its_error_in_its_place() -> None:
    async with LiveEngine(ScriptedBackend()) as engine, lines_on(engine) as lines:
        bad = (
            None,
            b"{",
            b"\xff",
            b"[]",
            text("b", url="/v1/images"),
            text("c", body=[]),
            text("d", method="GET"),
            json.dumps({"custom_id": "e"}).encode(),
            text("f", body={"prompt": "x" * engine.backend.limits.max_bytes}),
        )
        answers = await answered(lines, text("a"), *bad, text("z"))
        assert answers[0] == ("a", answer(request("a")))
        assert answers[-1] == ("z", answer(request("z")))
        codes = [each.result.body["error"]["code"] for each in answers[1:-1]]
        assert codes == [
            *("invalid_json_line", "invalid_json_line", "invalid_json_line", "invalid_json_line"),
            *("url_mismatch", "invalid_request", "invalid_request", "invalid_request"),
            "line_too_large",
        ]
        assert [each.custom_id for each in answers[5:10]] == ["b", "c", "d", "e", "f"]
        assert len(engine.backend.started) == 2


async def test_the_job_fails_when_there_is_no_engine_for_long() -> None:
    async with LiveEngine() as engine, lines_on(engine, no_engine_timeout_s=1.0) as lines:
        serving = asyncio.ensure_future(answered(lines, text("a")))
        await engine.holds(1)
        await engine.kill()
        with pytest.raises(ServerGoneError, match="no engine has taken lines for 1 s: http"):
            await serving


async def test_a_job_waits_while_a_proxy_says_that_its_engine_is_gone() -> None:
    class Restarting(LiveEngine):
        is_gone = True

        async def _report(self, report: EngineReport) -> EngineReport:
            if self.is_gone:
                raise HTTPException(502)
            return await super()._report(report)

    async with Restarting(ScriptedBackend()) as engine, lines_on(engine) as lines:
        serving = asyncio.ensure_future(answered(lines, text("a")))
        await asyncio.sleep(1.5)
        assert not serving.done()
        engine.is_gone = False
        assert (await serving)[0].result.is_ok


async def test_the_job_names_the_engines_that_cannot_be_used() -> None:
    class Grpc(EngineSource):
        async def urls(self) -> Sequence[str]:
            return ["grpc://a:1"]

    async with FleetLines(Grpc(), ADMIN_KEY, job="job", no_engine_timeout_s=0.1) as lines:
        with pytest.raises(ServerGoneError, match=r"0\.1 s: .*grpc://a:1"):
            await answered(lines, text("a"))


async def test_the_job_fails_at_once_when_no_engine_takes_the_key() -> None:
    async with LiveEngine() as engine, lines_on(engine, admin_key="another") as lines:
        with pytest.raises(ServerGoneError, match="--admin-api-key"):
            await answered(lines, text("a"))


async def test_leaving_it_gives_the_lines_back_and_leaves_nothing_behind() -> None:
    async with LiveEngine() as engine:
        before = asyncio.all_tasks()
        async with lines_on(engine) as lines:
            serving = asyncio.ensure_future(answered(lines, text("a")))
            await engine.holds(1)
            serving.cancel()
        await engine.holds(0)
        await until(lambda: not engine.num_connections)
        await asyncio.wait({serving})
        # One task of the engine's is for each of its connections.
        await until(lambda: asyncio.all_tasks() <= before)


async def test_an_actor_leaves_its_engines_when_ray_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    from sglang_coserve.ray.completion import _CompleteLines

    class Context:
        def get_job_id(self) -> str:
            return "01"

    monkeypatch.setattr(ray, "get_runtime_context", Context)
    async with LiveEngine() as engine:
        actor = _CompleteLines(EngineList([engine.url]), ADMIN_KEY, GIVE_UP_S)
        await until(lambda: engine.num_connections > 0)
        ended = weakref.finalize(actor, lambda: None)
        holding = [actor]
        del actor
        # Its end waits for connections, which are this loop's.
        await asyncio.to_thread(holding.clear)
        assert not ended.alive
        await until(lambda: not engine.num_connections)
        assert "engines" not in {thread.name for thread in threading.enumerate()}


def test_a_dataset_without_requests_is_refused_before_any_engine_is_asked() -> None:
    import pyarrow as pa

    from sglang_coserve.ray.completion import _CompleteLines

    with pytest.raises(ConfigError, match="no column 'request', but \\['prompt'\\]"):
        _CompleteLines.__call__(object(), pa.table({"prompt": ["a"]}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"engines": []}, "name one at least"),
        ({"engines": "http://a:1"}, "a list"),
        ({"engines": ["a:1"]}, "http://HOST:PORT"),
        ({"engines": ["http://a:1/v1"]}, "http://a:1/v1.*http://HOST:PORT"),
        ({"admin_key": None}, "COSERVE_ENGINE_ADMIN_KEY"),
        ({"admin_key": "key\n"}, "line break"),
        ({"actors": 0}, "actors=0"),
        ({"lines_per_block": -1}, "lines_per_block=-1"),
        ({"no_engine_timeout_s": float("nan")}, "no_engine_timeout_s=nan"),
    ],
)
def test_arguments_that_cannot_be_used_are_told_at_once(
    arguments: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COSERVE_ENGINE_ADMIN_KEY", raising=False)
    given: dict[str, Any] = {"engines": ["http://a:1"], "admin_key": "key", **arguments}
    with pytest.raises(ConfigError, match=says):
        complete(None, **given)  # type: ignore[arg-type]


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("sglang_coserve.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'sglang-coserve\[ray\]'"):
        import sglang_coserve.ray  # noqa: F401
