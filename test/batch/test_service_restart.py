"""What a restart of the service continues, and what it tells again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from batch.manual_clock import ManualClock
from batch.scenarios import OWNER, lines, opened, play
from batch.scripted_backend import ScriptedBackend, failure


def test_a_restart_continues_every_batch_where_it_was(tmp_path: Path) -> None:
    async def before() -> list[str]:
        scene = await opened(tmp_path, ScriptedBackend(holds=True), max_in_flight=4)
        async with scene.service as service:
            running = await scene.create(lines(5, "run", max_tokens=30))
            await scene.in_flight(4)
            paused = await scene.create(lines(2, "pause"))
            await service.pause_batch(OWNER, paused.id)
            await scene.reaches(paused.id, "in_progress")
            scene.backend.held("run-1").finish()
            scene.backend.held("run-2").generate(11)
            await scene.clock.until(lambda: len(scene.backend.started) == 5)
            checking = await scene.create(lines(3, "check"))
        assert scene.backend.in_flight == []
        return [running.id, paused.id, checking.id]

    async def after(ids: list[str]) -> None:
        scene = await opened(tmp_path, clock=ManualClock(1_000_100.0))
        async with scene.service as service:
            running, checking = [await scene.ends(ids[i]) for i in (0, 2)]
            assert running.request_counts.completed == 5
            assert checking.request_counts.completed == 3
            generated = {r.custom_id: len(r.generated) for r in scene.backend.started}
            assert "run-1" not in generated, "a finished line was served again"
            assert generated["run-2"] == 11
            assert generated["run-3"] == 0
            assert len(await scene.records(running)) == 5
            assert (await service.retrieve_batch(OWNER, ids[1])).coserve.paused
            await service.resume_batch(OWNER, ids[1])
            assert (await scene.ends(ids[1])).status == "completed"
        assert list((tmp_path / "journal").iterdir()) == []

    play(after(play(before())))


def test_another_model_starts_unfinished_lines_over(tmp_path: Path) -> None:
    async def before() -> str:
        scene = await opened(tmp_path, ScriptedBackend(holds=True))
        async with scene.service:
            batch = await scene.create(lines(1, max_tokens=30))
            await scene.in_flight(1)
            scene.backend.held("id-1").generate(11)
        return batch.id

    async def after(batch_id: str) -> None:
        scene = await opened(tmp_path, ScriptedBackend(model="another"))
        async with scene.service:
            assert (await scene.ends(batch_id)).status == "completed"
            assert [request.generated for request in scene.backend.started] == [()]

    play(after(play(before())))


def test_weights_that_change_start_a_failed_line_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = await opened(tmp_path, ScriptedBackend(holds=True))
        async with scene.service:
            batch = await scene.create(lines(1, max_tokens=30))
            for started, continued, next_model in (
                (1, 0, "scripted"),
                (2, 5, "new weights"),
                (3, 0, "scripted"),
                (4, 10, "scripted"),
            ):
                await scene.clock.until(lambda n=started: len(scene.backend.started) == n)  # type: ignore[misc]
                assert len(scene.backend.started[-1].generated) == continued
                entry = scene.backend.held("id-1")
                entry.generate(5)
                scene.backend.model = next_model
                entry.finish(None if started == 4 else failure(503, is_retryable=True))
                await scene.in_flight(0)
            assert (await scene.ends(batch.id)).request_counts.completed == 1

    play(scenario())


def test_a_window_that_closes_while_the_server_is_down_is_closed(tmp_path: Path) -> None:
    async def before() -> str:
        scene = await opened(tmp_path, ScriptedBackend(holds=True))
        async with scene.service:
            batch = await scene.create(lines(2), "1h")
            await scene.in_flight(2)
            scene.backend.held("id-1").finish()
            await scene.in_flight(1)
        return batch.id

    async def after(batch_id: str) -> None:
        async with (scene := await opened(tmp_path, clock=ManualClock(1_010_000.0))).service:
            done = await scene.ends(batch_id)
            assert (done.status, done.request_counts.completed) == ("expired", 1)
            assert scene.backend.started == []

    play(after(play(before())))


def test_ends_are_told_once_and_survive_a_restart(tmp_path: Path) -> None:
    async def before() -> str:
        scene = await opened(tmp_path, record_events=True)
        async with scene.service as service:
            told = asyncio.create_task(service.event_added())
            batch = await scene.create(lines(1))
            await scene.ends(batch.id)
            await asyncio.wait_for(told, 10)
            (event,) = await service.pending_events()
            assert (event.type, event.batch_id, event.owner) == ("batch.completed", batch.id, OWNER)
            await service.retry_event(event.id, scene.clock.now_s() + 30)
            assert await service.pending_events() == []
            return event.id

    async def after(event_id: str) -> None:
        scene = await opened(tmp_path, record_events=True, clock=ManualClock(1_000_900.0))
        async with scene.service as service:
            (event,) = await service.pending_events()
            assert (event.id, event.attempts) == (event_id, 1)
            await service.settle_event(event.id)
            assert await service.pending_events() == []

    play(after(play(before())))


def test_nothing_is_told_when_nobody_listens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (scene := await opened(tmp_path)).service as service:
            await scene.ends((await scene.create(lines(1))).id)
            assert await service.pending_events() == []

    play(scenario())
