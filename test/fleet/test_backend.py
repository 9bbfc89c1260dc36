"""A fleet of engines behind real sockets, that drain, die, hang and change their models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import aiohttp
import pytest

from batch.scenarios import OWNER, line, lines, stream, wanted
from batch.scripted_backend import ENDPOINT, ScriptedBackend, answer, tokens_of
from chaos_bench.cut_proxy import CutConnections
from http_lines.live_engine import ADMIN_KEY, LiveEngine
from sglang_coserve.batch.service import BatchService
from sglang_coserve.fleet.backend import _MOST_SETBACKS, FleetBackend
from sglang_coserve.fleet.engine import LINES_AHEAD, EngineState
from sglang_coserve.fleet.line_placement.failure_streak import FAILURES_IN_A_ROW
from sglang_coserve.fleet.line_placement.placement import DEATHS_BEFORE_APART
from sglang_coserve.http_lines.engine_load import WantedLines
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.backend import FailureKind, LineRequest, LineResult, MovedKv
from waiting import GIVE_UP_S, until


def request(name: str = "a") -> LineRequest:
    """Each name is a line of its own."""
    number = crc32(name.encode())
    return LineRequest("batch_1", number, ENDPOINT, {"prompt": name, "max_tokens": 6})


@asynccontextmanager
async def fleet_of(
    *engines: LiveEngine,
    monotonic_s: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[FleetBackend]:
    """A fleet that has looked at all of its engines."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        fleet = await stack.enter_async_context(
            FleetBackend(ADMIN_KEY, monotonic_s=monotonic_s, look_interval_s=0.02)
        )
        fleet.engines.set_listed(engine.url for engine in engines)
        await until(lambda: all(e.state is not EngineState.DOWN for e in fleet.engines))
        yield fleet


class Lines:
    """Lines that are being served, with what was heard of them."""

    def __init__(self, fleet: FleetBackend, names: Sequence[str]) -> None:
        self.heard: dict[str, list[int]] = {name: [] for name in names}
        self.tasks = {
            name: asyncio.ensure_future(fleet.run(request(name), self.heard[name].extend))
            for name in names
        }

    async def finish(self, *engines: LiveEngine) -> None:
        """Answer every line, wherever it comes to be."""

        def are_all_done() -> bool:
            finish_all(*engines)
            return all(task.done() for task in self.tasks.values())

        await until(are_all_done)

    async def results(self) -> dict[str, LineResult]:
        async with asyncio.timeout(GIVE_UP_S):
            return {name: await task for name, task in self.tasks.items()}


def where(name: str, *engines: LiveEngine) -> LiveEngine | None:
    """The engine that has a line."""
    for engine in engines:
        if any(entry.request.body["prompt"] == name for entry in engine.backend.in_flight):
            return engine
    return None


async def spread(fleet: FleetBackend, *engines: LiveEngine) -> Lines:
    """Twelve lines, of which each engine has some."""
    served = Lines(fleet, [f"line {n}" for n in range(12)])
    await until(lambda: sum(len(engine.backend.in_flight) for engine in engines) == 12)
    assert all(engine.backend.in_flight for engine in engines)
    return served


def state_of(fleet: FleetBackend, engine: LiveEngine) -> EngineState:
    (known,) = (each for each in fleet.engines if each.url == engine.url)
    return known.state


def finish_all(*engines: LiveEngine, but: str | None = None) -> None:
    for engine in engines:
        for entry in list(engine.backend.in_flight):
            if entry.request.body["prompt"] != but:
                entry.finish()


async def test_an_engine_that_dies_costs_a_line_no_attempt_and_no_tokens() -> None:
    a, b = LiveEngine(), LiveEngine()
    async with fleet_of(a, b) as fleet:
        served = await spread(fleet, a, b)
        for engine in (a, b):
            for entry in engine.backend.in_flight:
                entry.generate(2)
        await until(lambda: all(len(tokens) == 2 for tokens in served.heard.values()))
        num_lost = len(a.backend.in_flight)
        await a.kill()
        await b.holds(12)
        moved = [e.request for e in b.backend.in_flight if e.request.generated]
        assert len(moved) == num_lost == fleet.ends["lost"]
        assert all(r.generated == tuple(tokens_of(r.body["prompt"], 2)) for r in moved)
        assert state_of(fleet, a) is EngineState.DOWN
        finish_all(b)
        results = await served.results()
        for name, result in results.items():
            assert result == answer(request(name))


async def test_what_an_engine_has_left_of_a_line_goes_to_whichever_goes_on() -> None:
    a, b, c = LiveEngine(), LiveEngine(), LiveEngine()
    async with fleet_of(a, b, c) as fleet:
        served = Lines(fleet, ["a"])
        await until(lambda: where("a", a, b, c))
        first = where("a", a, b, c)
        first.backend.held("a").generate(2)
        first.backend.leaves = kv = MovedKv("0" * 32, 48)
        first.lines.close("it drains")
        others = [engine for engine in (a, b, c) if engine is not first]
        await until(lambda: where("a", *others))
        second = where("a", *others)
        # Three, as it had generated one more when it gave the line back.
        assert second.backend.held("a").request.generated == tuple(tokens_of("a", 3))
        assert second.backend.held("a").request.kv == kv
        await second.kill()
        (third,) = (engine for engine in others if engine is not second)
        await third.holds(1)
        assert third.backend.held("a").request.kv == kv
        finish_all(third)
        assert (await served.results())["a"] == answer(request("a"))
        assert fleet.ends["moved"] == 1


async def test_an_engine_that_drains_gets_no_new_lines_and_its_own_go_on_elsewhere() -> None:
    a, b = LiveEngine(), LiveEngine()
    async with fleet_of(a, b) as fleet:
        served = await spread(fleet, a, b)
        num_moved = len(a.backend.in_flight)
        a.lines.close("it drains")
        await b.holds(12)
        assert (fleet.ends["moved"], fleet.ends["lost"]) == (num_moved, 0)
        await until(lambda: state_of(fleet, a) is EngineState.DRAINING)
        more = Lines(fleet, ["one more", "and another"])
        await b.holds(14)
        assert a.backend.in_flight == []
        finish_all(b)
        await served.results()
        assert all(result.is_ok for result in (await more.results()).values())


async def test_a_line_that_engines_die_of_is_given_up_and_no_other() -> None:
    """Each engine that gets the poison dies at once, and is started again."""
    engines = [LiveEngine() for _ in range(3)]
    async with fleet_of(*engines) as fleet:
        served = Lines(fleet, ["poison", *(f"line {n}" for n in range(8))])
        num_deaths = 0
        async with asyncio.timeout(GIVE_UP_S):
            while not served.tasks["poison"].done():
                deadly = where("poison", *engines)
                if deadly is not None:
                    await deadly.kill()
                    num_deaths += 1
                    engines[engines.index(deadly)] = again = LiveEngine(port=deadly.port)
                    await again.__aenter__()
                finish_all(*engines, but="poison")
                await asyncio.sleep(0.01)
        assert DEATHS_BEFORE_APART < num_deaths <= DEATHS_BEFORE_APART + 4, "halves of nine lines"

        await served.finish(*engines)
        results = await served.results()
        poison = results.pop("poison")
        assert (poison.status_code, poison.is_retryable) == (0, False)
        assert poison.body["error"]["code"] == "engine_failed"
        assert "no other line beside it" in poison.body["error"]["message"]
        assert all(result.is_ok for result in results.values())
        assert fleet.ends["given_up"] == 1
        for engine in engines:
            await engine.kill()


@asynccontextmanager
async def cut_off(*engines: LiveEngine) -> AsyncGenerator[tuple[Any, ...]]:
    """A fleet, and the proxy before each of its engines."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        proxies = [await stack.enter_async_context(CutConnections(each.port)) for each in engines]
        fleet = FleetBackend(ADMIN_KEY, look_interval_s=0.02)
        await stack.enter_async_context(fleet)
        fleet.engines.set_listed(proxy.url for proxy in proxies)
        await until(lambda: all(engine.is_up for engine in fleet.engines))
        yield fleet, *proxies


async def test_connections_that_are_cut_blame_nobody_and_lines_continue() -> None:
    """The engine is the same one afterwards, so no line is suspected of anything."""
    a, b = LiveEngine(), LiveEngine()
    async with cut_off(a, b) as (fleet, to_a, to_b):
        served = Lines(fleet, [f"line {n}" for n in range(12)])
        for cut in range(1, 5):
            await until(lambda: len(a.backend.in_flight) + len(b.backend.in_flight) == 12)
            for entry in [*a.backend.in_flight, *b.backend.in_flight]:
                entry.generate(1)
            await until(
                lambda: all(len(heard) == cut for heard in served.heard.values())  # noqa: B023
            )
            to_a.cut()
            to_b.cut()
            await until(lambda: fleet.ends["cut"] == 12 * cut)  # noqa: B023
        await until(lambda: len(a.backend.in_flight) + len(b.backend.in_flight) == 12)
        finish_all(a, b)
        assert all(result.is_ok for result in (await served.results()).values())
        assert (fleet.ends["lost"], fleet.ends["given_up"]) == (0, 0)


async def test_an_engine_that_seemed_dead_takes_its_lines_off_suspicion() -> None:
    """Its network was away for longer than a look, twice, and it never ended."""
    a = LiveEngine()
    async with cut_off(a) as (fleet, to_a):
        served = Lines(fleet, ["one", "two"])
        for outage in range(1, DEATHS_BEFORE_APART + 2):
            await a.holds(2)
            for entry in a.backend.in_flight:
                entry.generate(1)
            # Now the fleet knows that the engine has them.
            await until(lambda: all(len(h) == outage for h in served.heard.values()))  # noqa: B023
            to_a.is_away = True
            to_a.cut()
            await until(lambda: fleet.ends["lost"] == 2 * outage)  # noqa: B023
            await a.holds(0)
            to_a.is_away = False
        await a.holds(2)
        finish_all(a)
        assert all(result.is_ok for result in (await served.results()).values())
        assert fleet.ends["given_up"] == 0


async def test_a_stuck_engine_gets_nothing_and_its_lines_go_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its server answers, and nothing is heard of its schedulers."""
    monkeypatch.setattr("sglang_coserve.fleet.engine._DEAD_S", 0.3)
    stuck, well = LiveEngine(), LiveEngine()
    async with fleet_of(stuck, well) as fleet:
        served = await spread(fleet, stuck, well)
        stuck.pulse_age_s = 40.0
        await until(lambda: state_of(fleet, stuck) is EngineState.STUCK)
        await well.holds(12)
        await stuck.holds(0)
        more = Lines(fleet, [f"more {n}" for n in range(4)])
        await well.holds(16)
        stuck.pulse_age_s = 0.0
        await until(lambda: state_of(fleet, stuck) is EngineState.UP)
        finish_all(well)
        for lines_ in (served, more):
            assert all(result.is_ok for result in (await lines_.results()).values())


async def test_a_short_outage_of_the_majority_does_not_change_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_coserve.fleet.engine._DEAD_S", 0.3)
    engines = [LiveEngine(), LiveEngine(), LiveEngine(ScriptedBackend(holds=True, model="canary"))]
    async with fleet_of(*engines) as fleet:
        assert fleet.model == "scripted"
        served = Lines(fleet, ["a", "b"])
        await until(lambda: len(engines[0].backend.in_flight + engines[1].backend.in_flight) == 2)
        for engine in engines[:2]:
            await engine.kill()
        await until(lambda: state_of(fleet, engines[1]) is EngineState.DOWN)
        await asyncio.sleep(0.1)  # Some looks.
        assert fleet.model == "scripted"
        assert fleet.stalled_by
        assert engines[2].backend.started == []
        async with LiveEngine(port=engines[0].port) as again:
            await served.finish(again)
            assert all(result.is_ok for result in (await served.results()).values())


async def test_a_line_goes_only_where_its_adapter_is() -> None:
    without, has_sql = LiveEngine(), LiveEngine()
    has_sql.models = ("scripted", "sql")
    async with fleet_of(without, has_sql) as fleet:
        assert set(fleet.model_names) == {"scripted", "adapter", "sql"}
        tasks = []
        for n, asked in enumerate(["sql", "scripted:sql", "scripted", None] * 5):
            line_of = LineRequest("b", n, ENDPOINT, {"prompt": f"{n}"})
            if asked is not None:
                line_of.body["model"] = asked
            tasks.append(asyncio.ensure_future(fleet.run(line_of, lambda _: None)))
        await until(lambda: len(without.backend.in_flight + has_sql.backend.in_flight) == 20)
        models = [entry.request.body.get("model") for entry in without.backend.in_flight]
        assert models and set(models) <= {"scripted", None}
        finish_all(without, has_sql)
        assert all(result.is_ok for result in await asyncio.gather(*tasks))


def not_found(code: str = "model_not_found") -> LineResult:
    return LineResult(404, "", {"error": {"code": code}})


async def test_an_adapter_that_was_unloaded_just_now_is_asked_for_elsewhere() -> None:
    """The engine says so of the first line, before it is looked at again."""
    gone = LiveEngine(ScriptedBackend(answers=lambda _: unload()))
    there = LiveEngine(ScriptedBackend())

    def unload() -> LineResult:
        gone.models = ("scripted",)
        return not_found()

    for engine in (gone, there):
        engine.models = ("scripted", "sql")
    async with fleet_of(gone, there) as fleet:
        for n in range(20):
            asked = LineRequest("b", n, ENDPOINT, {"prompt": f"{n}", "model": "sql"})
            assert (await fleet.run(asked, lambda _: None)).is_ok
        assert len(gone.backend.started) <= 1


@pytest.mark.parametrize("asked", ["sql", "scripted", None])
@pytest.mark.parametrize("code", ["model_not_found", "not_found"])
async def test_another_404_is_the_answer(asked: str | None, code: str) -> None:
    """Of an engine that still has the adapter, or of something else than a model."""
    engine = LiveEngine(ScriptedBackend(answers=lambda _: not_found(code)))
    engine.models = ("scripted", "sql")
    async with fleet_of(engine) as fleet:
        bad = LineRequest("b", 1, ENDPOINT, {"prompt": "a", "model": asked})
        result = await asyncio.wait_for(fleet.run(bad, lambda _: None), GIVE_UP_S)
        assert (result.status_code, len(engine.backend.started)) == (404, 1)
        assert engine.lines.refuses is None and state_of(fleet, engine) is EngineState.UP


async def test_a_line_whose_adapter_no_engine_has_any_more_is_answered() -> None:
    engine = LiveEngine()
    engine.models = ("scripted", "sql")
    async with fleet_of(engine) as fleet:
        engine.lines.close("it drains")
        await until(lambda: state_of(fleet, engine) is EngineState.DRAINING)
        asked = LineRequest("b", 1, ENDPOINT, {"prompt": "a", "model": "sql"})
        waiting = asyncio.ensure_future(fleet.run(asked, lambda _: None))
        await until(lambda: fleet.lines_waiting == 1)
        engine.models = ("scripted",)
        result = await asyncio.wait_for(waiting, GIVE_UP_S)
        assert result.body["error"]["code"] == "model_not_found"
        assert fleet.lines_waiting == 0


async def test_a_short_outage_of_the_network_ends_no_line() -> None:
    """Connections are refused on the way to every engine for a moment: no engine had the line."""
    engines = [LiveEngine() for _ in range(3)]
    async with cut_off(*engines) as (fleet, *proxies):
        served = Lines(fleet, ["a", "b", "c"])
        await until(lambda: sum(len(engine.backend.in_flight) for engine in engines) == 3)
        for proxy in proxies:
            proxy.is_away = True
            proxy.cut()
        await until(lambda: fleet.stalled_by is not None)
        for proxy in proxies:
            proxy.is_away = False
        await served.finish(*engines)
        assert all(result.is_ok for result in (await served.results()).values())
        assert fleet.ends["given_up"] == 0


async def test_a_line_that_is_sent_in_vain_again_and_again_is_a_failed_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever keeps the line counts it."""
    monkeypatch.setattr("sglang_coserve.fleet.backend._MOST_PAUSE_S", 0.01)
    engine = LiveEngine()
    async with cut_off(engine) as (fleet, proxy):
        served = Lines(fleet, ["embedding"])
        for _ in range(_MOST_SETBACKS):
            await engine.holds(1)
            proxy.cut()
            await engine.holds(0)
        result = (await served.results())["embedding"]
        assert (result.is_retryable, result.kind) == (True, FailureKind.LOST)


async def test_an_engine_that_was_started_again_keeps_the_lines_that_it_got_since() -> None:
    """Its connection to an old line breaks late: a proxy held it."""
    engine = LiveEngine()
    async with cut_off(engine) as (fleet, _):
        old = Lines(fleet, ["old"])
        await engine.holds(1)
        engine.lines._run = "the next run"
        await until(lambda: fleet.ends["lost"] == 1)
        new = Lines(fleet, ["new"])
        await until(lambda: where("new", engine) and where("old", engine))
        finish_all(engine)
        assert (await new.results())["new"].is_ok
        await old.finish(engine)
        assert (await old.results())["old"].is_ok
        assert fleet.ends["lost"] == 1


async def test_an_engine_that_is_forgotten_while_it_is_looked_at_loses_no_line() -> None:
    engine, other = LiveEngine(), LiveEngine()
    async with fleet_of(engine) as fleet, other:
        served = Lines(fleet, [f"{n}" for n in range(6)])
        await engine.holds(6)
        fleet.engines.set_listed([other.url])
        await engine.kill()
        await other.holds(6)
        finish_all(other)
        assert all(result.is_ok for result in (await served.results()).values())


async def test_an_engine_that_answers_and_fails_does_not_get_every_line() -> None:
    def fail(_request: LineRequest) -> LineResult:
        return LineResult(500, "", {"error": {"message": "broken"}}, is_retryable=True)

    broken, well = LiveEngine(ScriptedBackend(answers=fail)), LiveEngine(ScriptedBackend())
    now_s = 0.0
    async with fleet_of(broken, well, monotonic_s=lambda: now_s) as fleet:
        names = [f"line {n}" for n in range(100)]
        failed = 0
        for name in names:
            result = await fleet.run(request(name), lambda _: None)
            failed += result.is_retryable
        assert failed == FAILURES_IN_A_ROW
        states = {engine.url: engine for engine in fleet.engines}
        assert states[broken.url].state is EngineState.FAILING
        assert "broken" in str(states[broken.url].reason)
        assert states[well.url].lines_served == len(names) - failed
        broken.backend.answers = answer
        now_s = 1000.0
        await until(lambda: states[broken.url].state is EngineState.UP)
        for name in names:
            assert (await fleet.run(request(name), lambda _: None)).is_ok
        assert states[broken.url].lines_served > 0


async def test_a_cancelled_line_is_aborted_and_makes_room() -> None:
    a = LiveEngine()
    async with fleet_of(a) as fleet:
        names = [f"{n}" for n in range(10 * LINES_AHEAD)]
        served = Lines(fleet, names)
        await until(lambda: len(a.backend.in_flight) >= LINES_AHEAD)
        served.tasks[names[0]].cancel()
        await until(lambda: len(a.backend.aborted) == 1)
        # Some wait, some are on their way, some are there.
        for task in served.tasks.values():
            task.cancel()
        await asyncio.wait(served.tasks.values())
        await a.holds(0)
        assert fleet.lines_waiting == 0
        assert fleet.lines_in(next(iter(fleet.engines))) == 0


async def test_each_engine_that_is_up_brings_bytes_of_its_own() -> None:
    async with fleet_of(LiveEngine(), LiveEngine()) as fleet:
        assert fleet.load().num_engines == 2


async def test_windows_follow_what_runs() -> None:
    a = LiveEngine()
    async with fleet_of(a) as fleet:
        (engine,) = fleet.engines
        assert fleet.load().max_in_flight == 2 * LINES_AHEAD
        served = Lines(fleet, [f"{n}" for n in range(4 * LINES_AHEAD)])
        # Nothing of it waits in the engine, so it can have more.
        await a.holds(4 * LINES_AHEAD)
        await until(lambda: engine.window == 5 * LINES_AHEAD)
        for entry in a.backend.in_flight:
            entry.generate(2)
        finish_all(a)
        await served.results()
        assert engine.lines_served == 4 * LINES_AHEAD
        load = fleet.load()
        assert load.total_tokens > 0
        assert load.offline_tokens_per_s is not None


async def test_the_model_of_most_engines_is_served_and_answers_are_never_mixed() -> None:
    engines = [LiveEngine() for _ in range(3)]
    async with fleet_of(*engines) as fleet:
        taken_out = []
        fleet.when_changing(lambda: taken_out.append(fleet.model))
        engines[0].backend.model = "new"
        await until(lambda: [e.model for e in fleet.engines].count("new") == 1)
        assert fleet.model == "scripted"
        served = Lines(fleet, [f"{n}" for n in range(8)])
        await until(lambda: sum(len(e.backend.in_flight) for e in engines) == 8)
        assert engines[0].backend.in_flight == []
        finish_all(*engines)
        await served.results()
        engines[1].backend.model = "new"
        await until(lambda: fleet.model == "new")
        assert taken_out == ["new"]
        one = Lines(fleet, ["a", "b", "c", "d"])
        await until(lambda: sum(len(e.backend.in_flight) for e in engines) == 4)
        assert engines[2].backend.in_flight == []
        finish_all(*engines)
        await one.results()


async def test_what_every_engine_takes_is_what_the_fleet_takes() -> None:
    small = LiveEngine(ScriptedBackend(holds=True, limits=BodyLimits(max_bytes=1000)))
    fewer = LiveEngine(ScriptedBackend(holds=True, endpoints=frozenset({ENDPOINT})))
    async with fleet_of(small, fewer) as fleet:
        assert fleet.limits == BodyLimits(max_bytes=1000)
        assert fleet.endpoints == {ENDPOINT}


async def test_an_engine_that_is_taken_from_the_list_ends_what_it_has() -> None:
    a, b = LiveEngine(), LiveEngine()
    async with fleet_of(a, b) as fleet:
        served = await spread(fleet, a, b)
        count = len(a.backend.in_flight)
        fleet.engines.set_listed([b.url])
        await until(lambda: state_of(fleet, a) is EngineState.DRAINING)
        assert len(a.backend.in_flight) == count
        finish_all(a, b)
        await served.results()
        await until(lambda: [e.url for e in fleet.engines] == [b.url])


async def test_a_batch_on_engines_that_come_and_go_has_one_record_for_each_line(
    tmp_path: Path,
) -> None:
    """The service as it is, unchanged, on a fleet."""
    engines = [LiveEngine(ScriptedBackend(holds=True)) for _ in range(3)]
    async with fleet_of(*engines) as fleet:
        async with await BatchService.open(tmp_path / "data", fleet) as service:
            content = lines(150, max_tokens=8) + line("last", max_tokens=8).encode() + b"\n"
            file = await service.create_file(OWNER, "in.jsonl", stream(content))
            batch = await service.create_batch(OWNER, wanted(file))
            for step in range(100_000):
                for engine in engines:
                    for number, entry in enumerate(list(engine.backend.in_flight)):
                        if (step + number) % 3 == 0 and entry.generated < 8:
                            entry.generate(min(3, 8 - entry.generated))
                        elif step % 3 == 1:
                            entry.finish()
                if step in (12, 40):
                    number = step // 40
                    await engines[number].kill()
                    engines[number] = LiveEngine(port=engines[number].port)
                    await engines[number].__aenter__()
                await asyncio.sleep(0.005)
                batch = await service.retrieve_batch(OWNER, batch.id)
                if batch.status == "completed":
                    break
            assert batch.request_counts.completed == 151
            output = await service.retrieve_file(OWNER, str(batch.output_file_id))
            chunks = service.files.read(output.id, 0, output.bytes)
            records = b"".join([chunk async for chunk in chunks]).decode().splitlines()
            assert len(records) == 151
            for name in (*(f"id-{n}" for n in range(1, 151)), "last"):
                tokens = " ".join(map(str, tokens_of(name, 8)))
                (record,) = [r for r in records if f'"{name}"' in r]
                assert tokens in record
        for engine in engines:
            await engine.kill()


async def test_a_strict_engine_takes_running_lines_over_and_gives_them_back() -> None:
    relaxed, strict = LiveEngine(pool="relaxed"), LiveEngine(pool="strict")
    async with fleet_of(relaxed, strict) as fleet:
        names = ["a" * length for length in (10, 20, 30)]
        served = Lines(fleet, names)
        await relaxed.holds(3)
        for entry in relaxed.backend.in_flight:
            entry.generate(2)
        relaxed.backend.leaves = left = MovedKv("0" * 32, 16)
        strict.wants = WantedLines(tokens=20, max_tokens=34, lines=8)
        await strict.holds(2)
        # The closest of 12, 22 and 32 tokens, and what fits beside it.
        assert where(names[1], strict) and where(names[0], strict)
        for name in names[:2]:
            entry = strict.backend.held(name)
            assert entry.request.kv == left
            assert entry.request.generated == tuple(tokens_of(name, 3))
            entry.generate(1)
        strict.wants = None
        await until(lambda: fleet.ends["pulled"] == 2 and fleet.ends["moved"] == 0)
        assert {engine.state for engine in fleet.engines} == {EngineState.UP}
        strict.backend.leaves, strict.waiting = MovedKv("1" * 32, 16), 1

        def given_back() -> list[MovedKv]:
            return [e.request.kv for e in relaxed.backend.in_flight if e.request.kv is not None]

        # One line, or both where the strict engine is asked again before it has it off its hands.
        await until(lambda: given_back() and fleet.ends["returned"])
        strict.waiting = 0
        assert all(kv == strict.backend.leaves for kv in given_back())
        finish_all(relaxed, strict)
        results = await served.results()
        assert all(results[name] == answer(request(name)) for name in names)


async def test_a_strict_engine_that_dies_loses_nothing_and_begins_lines_when_it_is_alone() -> None:
    relaxed, strict = LiveEngine(pool="relaxed"), LiveEngine(pool="strict")
    async with fleet_of(relaxed, strict) as fleet:
        served = Lines(fleet, ["one", "two"])
        await relaxed.holds(2)
        for entry in relaxed.backend.in_flight:
            entry.generate(2)
        relaxed.backend.leaves = MovedKv("0" * 32, 16)
        strict.wants = WantedLines(tokens=1, max_tokens=1000, lines=8)
        await strict.holds(2)
        await strict.kill()
        await relaxed.holds(2)
        assert fleet.ends["lost"] == 2
        assert all(len(e.request.generated) == 3 for e in relaxed.backend.in_flight)
        async with LiveEngine(port=strict.port, pool="strict") as again:
            relaxed.backend.leaves = None
            relaxed.lines.close("it drains")
            await again.holds(2)
            finish_all(again)
            assert all(result.is_ok for result in (await served.results()).values())


async def test_an_address_that_cannot_be_used_is_left_out_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[aiohttp.ClientSession] = []

    def session(*args: Any, **kwargs: Any) -> aiohttp.ClientSession:
        made.append(made_now := make(*args, **kwargs))
        return made_now

    make = aiohttp.ClientSession
    monkeypatch.setattr(aiohttp, "ClientSession", session)
    bad = ["grpc://b:1", "http://c:1/prefix", "host:1", "http://d:99999", ""]
    async with LiveEngine() as a, FleetBackend(ADMIN_KEY, look_interval_s=0.02) as fleet:
        for _ in range(3):
            fleet.engines.set_listed([bad[0], a.url, *bad[1:]])
        await until(lambda: fleet.model)
        assert [engine.url for engine in fleet.engines] == [a.url]
        assert list(fleet.engines.left_out) == bad
        assert len(made) == 1
        fleet.engines.set_listed([a.url])
        assert fleet.engines.left_out == {}
    assert all(session.closed for session in made)
    assert caplog.text.count("left out") == len(bad)
