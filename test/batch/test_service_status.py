"""What an operator is told of the whole service."""

from __future__ import annotations

from pathlib import Path

from batch.scenarios import OWNER, lines, opened
from batch.scripted_backend import ScriptedBackend, failure


async def test_the_status_counts_batches_and_lines(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True)
    scene = await opened(tmp_path, backend, record_events=True, max_in_flight=3)
    async with scene.service as service:
        idle = await service.status()
        assert (idle.batches, idle.lines_waiting, idle.webhooks_pending) == ({}, 0, 0)
        running = await scene.create(lines(10))
        await scene.in_flight(3)
        paused = await scene.create(lines(4, "other"))
        await service.pause_batch(OWNER, paused.id)
        await scene.reaches(paused.id, "in_progress")
        status = await service.status()
        assert status.batches == {"in_progress": 2}
        assert status.paused_batches == 1
        assert (status.lines_in_flight, status.lines_waiting) == (3, 7 + 4)
        assert 0 < status.bytes_in_flight < 3 * 1000
        await service.cancel_batch(OWNER, running.id)
        await scene.ends(running.id)
        status = await service.status()
        assert status.batches == {"in_progress": 1}
        assert (status.lines_in_flight, status.lines_waiting) == (0, 4)
        assert status.webhooks_pending == 1
        (event,) = await service.pending_events()
        await service.settle_event(event.id)
        assert (await service.status()).webhooks_pending == 0


async def test_the_status_counts_attempts_after_the_first(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True)
    async with (scene := await opened(tmp_path, backend, max_attempts=3)).service as service:
        batch = await scene.create(lines(2))
        for attempt in range(3):
            await scene.in_flight(2 if attempt == 0 else 1)
            scene.backend.held("id-1").finish(failure(503, is_retryable=True))
            if attempt == 0:
                scene.backend.held("id-2").finish()
            await scene.in_flight(0)
        assert (await scene.ends(batch.id)).request_counts.failed == 1
        assert (await service.status()).line_retries == 2
