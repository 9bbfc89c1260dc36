"""Several batches on one engine: limits, shares, prospects, deadlines."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batch.scenarios import lines, opened
from batch.scripted_backend import ScriptedBackend, name_of
from sglang_coserve.batch import job_lines


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
        slots = scene.service.context.slots
        await scene.clock.until(lambda: len(slots._waiting) == 6, "every batch waits")
        seen = len(backend.started)
        for count in range(seen + 1, seen + 21):
            backend.in_flight[0].finish()
            await scene.clock.until(lambda n=count: len(backend.started) == n)  # type: ignore[misc]
        order = [name_of(request).split("-")[0] for request in backend.started[seen:]]
        assert Counter(order) == {"greedy": 10, "modest": 10}
        first = {request.batch_id for request in backend.started[seen:]} - {modest.id}
        assert first == {ids[4]}


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
