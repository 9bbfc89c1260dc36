"""Several batches on one engine: limits, shares, prospects, deadlines."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batch.scenarios import OWNER, lines, opened
from batch.scripted_backend import ScriptedBackend, failure, name_of
from batch.test_eta import calls_of
from sglang_coserve.batch import job_lines
from sglang_coserve.batch import service as service_module
from sglang_coserve.batch.schemas import BatchObject

KIB = 1024


async def test_no_more_lines_are_in_flight_than_the_backend_has_use_for(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True, max_in_flight=3)
    scene = await opened(tmp_path, backend, max_in_flight=8)
    async with scene.service:
        batch = await scene.create(lines(40))
        for useful, in_flight in ((3, 3), (6, 6), (100, 8)):
            backend.max_in_flight = useful
            await scene.in_flight(in_flight)
        backend.holds = False
        backend.finish_all()
        assert (await scene.ends(batch.id)).status == "completed"


async def test_an_owner_gets_half_whatever_the_other_one_has(tmp_path: Path) -> None:
    """Five batches of the highest priority against one; of the five the earliest deadline goes."""
    backend = ScriptedBackend(holds=True)
    scene = await opened(tmp_path, backend, max_in_flight=1)
    async with scene.service:
        ids = []
        for n in range(5):
            window = "2000s" if n == 4 else "24h"
            batch = await scene.create(lines(40, "greedy"), window, "greedy", priority=100)
            await scene.reaches(batch.id, "in_progress", owner="greedy")
            ids.append(batch.id)
        modest = await scene.create(lines(40, "modest"), owner="modest", priority=-100)
        await scene.reaches(modest.id, "in_progress", owner="modest")
        shares = [driver.share for driver in scene.service.runner._drivers.values()]
        await scene.clock.until(lambda: sum(each.waits["slot"] for each in shares) == 6)
        seen = len(backend.started)
        for count in range(seen + 1, seen + 21):
            backend.in_flight[0].finish()
            await scene.clock.until(lambda n=count: len(backend.started) == n)  # type: ignore[misc]
        order = [name_of(request).split("-")[0] for request in backend.started[seen:]]
        assert Counter(order) == {"greedy": 10, "modest": 10}
        first = {request.batch_id for request in backend.started[seen:]} - {modest.id}
        assert first == {ids[4]}


async def test_an_owner_whose_lines_fail_gets_no_more_than_another(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True)
    scene = await opened(tmp_path, backend, max_in_flight=1)
    async with scene.service:
        for owner in ("failing", "served"):
            batch = await scene.create(lines(40, owner), owner=owner)
            await scene.reaches(batch.id, "in_progress", owner=owner)
        await scene.in_flight(1)
        for count in range(2, 22):
            running = backend.in_flight[0]
            is_failing = name_of(running.request).startswith("failing")
            running.finish(failure(400) if is_failing else None)
            await scene.clock.until(lambda n=count: len(backend.started) == n)  # type: ignore[misc]
        order = Counter(name_of(request).split("-")[0] for request in backend.started)
        assert order["failing"] <= order["served"]


async def test_a_line_that_is_cancelled_costs_what_the_engine_has_done_for_it(
    tmp_path: Path,
) -> None:
    backend = ScriptedBackend(holds=True)
    scene = await opened(tmp_path, backend, max_in_flight=2)
    async with scene.service as service:
        other = await scene.create(lines(2), owner="other")
        await scene.in_flight(2)
        batch = await scene.create(lines(2, max_tokens=1000))
        backend.finish_all()
        await scene.reaches(other.id, "completed", owner="other")
        await scene.in_flight(2)
        for each in backend.in_flight:
            each.generate(5)
        owner = service.context.slots._owners[OWNER]
        before = owner.served_tokens
        await service.change_batch(OWNER, batch.id, "pause")
        await scene.in_flight(0)
        await scene.clock.until(lambda: not owner.lines)
        assert 2 * (10 + 5) < owner.served_tokens - before < 2 * 100


async def test_a_large_line_of_one_key_holds_nobody_elses(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True)
    scene = await opened(tmp_path, backend, max_in_flight=64, max_in_flight_bytes=64 * KIB)
    async with scene.service:
        large = await scene.create(lines(1, x="x" * 64 * KIB), owner="large")
        await scene.in_flight(1)
        small = await scene.create(lines(100, "small"), owner="small")
        await scene.in_flight(1 + 4)

        def is_done(batch: BatchObject) -> bool:
            for each in backend.in_flight[1:]:
                each.finish()
            return batch.status == "completed"

        done = await scene.once(small.id, is_done, "small")
        assert done.request_counts.completed == 100
        (still,) = backend.in_flight
        assert still.request.batch_id == large.id


async def test_a_backend_of_many_engines_gets_as_many_times_the_bytes(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True)
    scene = await opened(tmp_path, backend, max_in_flight_bytes=10 * KIB)
    async with scene.service:
        await scene.create(lines(20, x="x" * 4 * KIB))
        for engines, in_flight in ((1, 2), (3, 7), (10, 20)):
            backend.num_engines = engines
            await scene.in_flight(in_flight)


async def test_a_look_at_a_batch_costs_the_same_beside_any_number(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True, tokens_per_s=1.0)
    scene = await opened(tmp_path, backend)
    async with scene.service as service:

        async def calls() -> int:
            scene.clock.advance(1.0)
            await asyncio.sleep(0.05)
            record = service.runner.unfinished()[0]
            assert service._shown(record).coserve.eta is not None
            return calls_of(lambda: service._shown(record))

        await scene.create(lines(1))
        await scene.in_flight(1)
        alone = await calls()
        for n in range(20):
            await scene.create(lines(1), owner=str(n))
        await scene.in_flight(21)
        assert await calls() <= alone + 4, "a longer way through sorted lists"


async def test_owners_take_turns_at_lists(tmp_path: Path) -> None:
    """One page is read at a time, of a thousand files at the most."""
    scene = await opened(tmp_path)
    async with scene.service as service:
        served: list[str] = []

        async def listed(owner: str) -> None:
            await service.list_files(owner)
            served.append(owner)

        await asyncio.gather(*map(listed, [*["greedy"] * 20, "modest"]))
        assert served.index("modest") <= 2


async def test_a_list_goes_on_behind_a_page_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "MOST_ROWS", 2)
    scene = await opened(tmp_path)
    async with scene.service as service:
        ids = [(await scene.upload(b"")).id for _ in range(5)]
        found: list[str] = []
        has_more = True
        while has_more:
            page = await service.list_files(OWNER, after=found[-1] if found else None)
            found += [file.id for file in page.data]
            has_more = page.has_more
        assert found == ids[::-1]


async def test_owners_take_turns_at_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file waits for those being read, and not for all that came before it."""
    begun: list[str] = []
    is_open = asyncio.Event()
    run = job_lines.run_module

    async def noted(what: str, module: str, *arguments: str, **variables: str) -> Any:
        begun.append(Path(arguments[0]).name)
        await is_open.wait()
        return await run(what, module, *arguments, **variables)

    monkeypatch.setattr(job_lines, "run_module", noted)
    scene = await opened(tmp_path, ScriptedBackend(holds=True))
    async with scene.service:
        for _ in range(5):
            await scene.create(lines(2000), owner="greedy")
        await scene.clock.until(lambda: len(begun) == 2)
        small = await scene.create(lines(1), owner="modest")
        is_open.set()
        await scene.reaches(small.id, "in_progress", owner="modest")
        assert begun.index(small.input_file_id) == 2
