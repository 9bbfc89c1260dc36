"""Batches that are refused, cancelled, paused or expire, and what an operator is told of all."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from batch.scenarios import OWNER, lines, opened, undelivered, wanted
from batch.scripted_backend import ScriptedBackend
from sglang_coserve.batch.routes import view
from sglang_coserve.batch.routes.service import set_service
from sglang_coserve.batch.schemas import BatchObject
from waiting import GIVE_UP_S


async def test_a_batch_may_be_paused_before_it_is_checked(tmp_path: Path) -> None:
    async with (scene := await opened(tmp_path)).service as service:
        batch = await scene.create(lines(1))
        await service.change_batch(OWNER, batch.id, "pause")
        await scene.reaches(batch.id, "in_progress")
        scene.clock.advance(10)
        assert scene.backend.started == []
        await service.change_batch(OWNER, batch.id, "resume")
        assert (await scene.ends(batch.id)).status == "completed"


@pytest.mark.parametrize("is_paused", [False, True])
async def test_an_expired_batch_keeps_what_is_finished_and_names_the_rest(
    tmp_path: Path, is_paused: bool
) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True), max_in_flight=2)
    async with scene.service as service:
        batch = await scene.create(lines(5), "30m")
        await scene.in_flight(2)
        scene.backend.held("id-2").finish()
        await scene.clock.until(lambda: len(scene.backend.started) == 3)
        if is_paused:
            await service.change_batch(OWNER, batch.id, "pause")
            await scene.in_flight(0)
        scene.clock.advance(1801)
        done = await scene.ends(batch.id)
        assert done.status == "expired"
        assert done.expired_at is not None
        assert done.request_counts.model_dump() == {"total": 5, "completed": 1, "failed": 4}
        records = await scene.records(done)
        assert len(records) == 5
        assert records["id-2"]["error"] is None
        for custom_id in ("id-1", "id-3", "id-4", "id-5"):
            assert records[custom_id]["response"] is None
            assert records[custom_id]["error"]["code"] == "batch_expired"
        assert scene.backend.in_flight == []


@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_batch_whose_last_record_is_being_written_is_complete(
    tmp_path: Path, is_paused: bool
) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True))
    async with scene.service as service:
        batch = await scene.create(lines(1), "30m")
        await scene.in_flight(1)
        gate, threads = threading.Event(), service.context.threads
        busy = [asyncio.create_task(threads.run(gate.wait, GIVE_UP_S)) for _ in range(4)]
        await asyncio.sleep(0)
        scene.backend.held("id-1").finish()
        await scene.in_flight(0)
        if is_paused:
            await service.change_batch(OWNER, batch.id, "pause")
        scene.clock.advance(1801)
        gate.set()
        await asyncio.wait(busy)
        done = await scene.ends(batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 1)


async def test_a_caller_who_hangs_up_leaves_no_batch_without_a_driver(tmp_path: Path) -> None:
    async with (scene := await opened(tmp_path)).service as service:
        file = await scene.upload(lines(1))
        calling = asyncio.create_task(service.create_batch(OWNER, wanted(file)))
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait({calling})
        assert calling.cancelled()

        async def known() -> BatchObject | None:
            return next(iter((await service.list_batches(OWNER)).data), None)

        assert (await scene.ends((await scene.eventually(known)).id)).status == "completed"


async def test_a_service_that_closes_waits_for_who_is_creating_a_batch(tmp_path: Path) -> None:
    scene = await opened(tmp_path)
    file = await scene.upload(lines(1))
    gate, threads = threading.Event(), scene.service.context.threads
    busy = [asyncio.create_task(threads.run(gate.wait, GIVE_UP_S)) for _ in range(4)]
    calling = asyncio.create_task(scene.service.create_batch(OWNER, wanted(file)))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(scene.service.close())
    await asyncio.sleep(0.05)
    gate.set()
    await asyncio.wait({closing, calling, *busy})
    assert scene.service.context.background.state()["batch"]["running"] == 0
    async with (scene := await opened(tmp_path)).service:
        assert (await scene.ends(calling.result().id)).status == "completed"


async def test_the_status_counts_batches_and_lines(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True)
    scene = await opened(tmp_path, backend, event_delivery=undelivered, max_in_flight=3)
    async with scene.service as service:
        idle = await service.status()
        assert (idle.batches, idle.lines_waiting, idle.webhooks_pending) == ({}, 0, 0)
        running = await scene.create(lines(10))
        await scene.in_flight(3)
        paused = await scene.create(lines(4, "other"))
        await service.change_batch(OWNER, paused.id, "pause")
        await scene.reaches(paused.id, "in_progress")
        status = await service.status()
        assert status.batches == {"in_progress": 2}
        assert status.paused_batches == 1
        assert (status.lines_in_flight, status.lines_waiting) == (3, 7 + 4)
        assert 0 < status.bytes_in_flight < 3 * 1000
        await service.change_batch(OWNER, running.id, "cancel")
        await scene.ends(running.id)
        status = await service.status()
        assert status.batches == {"in_progress": 1}
        assert (status.lines_in_flight, status.lines_waiting) == (0, 4)
        assert status.webhooks_pending == 1


class _Leaving(ScriptedBackend):
    """Lines take as long to leave the engine as ``left`` says."""

    left: asyncio.Event

    async def run(self, request: Any, on_tokens: Any) -> Any:
        try:
            return await super().run(request, on_tokens)
        finally:
            await self.left.wait()


async def test_the_view_has_a_batch_that_goes_on_however_many_are_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "_BATCHES", 2)
    scene = await opened(tmp_path, ScriptedBackend(holds=True))
    async with scene.service as service:
        file = await scene.upload(lines(1))
        long = await service.create_batch(OWNER, wanted(file))
        await scene.create(lines(1), owner="another")
        for _ in range(3):
            short = await service.create_batch(OWNER, wanted(file))
            await service.change_batch(OWNER, short.id, "cancel")
            await scene.ends(short.id)
        set_service(app := FastAPI(), service)
        shown = await view.shown_batches(app, view.Caller(OWNER, "/v1/batches"))
        ids = [batch["id"] for batch in shown["batches"]["data"]]
        assert ids[:2] == [long.id, short.id]
        assert len(ids) == len(set(ids)) == 3


async def test_what_is_created_while_lines_leave_is_the_next_services(tmp_path: Path) -> None:
    backend = _Leaving(holds=True)
    backend.left = asyncio.Event()
    scene = await opened(tmp_path, backend)
    file = await scene.upload(lines(1))
    await scene.service.create_batch(OWNER, wanted(file))
    await scene.in_flight(1)
    closing = asyncio.create_task(scene.service.close())
    await asyncio.sleep(0.05)
    late = await scene.service.create_batch(OWNER, wanted(file))
    backend.left.set()
    await closing
    assert scene.service.context.background.state()["batch"]["running"] == 0
    async with (scene := await opened(tmp_path)).service:
        assert (await scene.ends(late.id)).status == "completed"
