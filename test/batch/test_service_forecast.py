"""When batches will be complete: said at once, learned from, kept, and refused if impossible."""

from __future__ import annotations

from pathlib import Path

import pytest

from batch.scenarios import OWNER, Scene, lines, opened, wanted
from batch.scripted_backend import ScriptedBackend
from sglang_coserve.batch.errors import BatchRequestError
from sglang_coserve.batch.schemas import BatchObject


async def served_in(scene: Scene, seconds: float) -> BatchObject:
    """A batch of about 1,100 tokens whose lines all end after so long."""
    batch = await scene.create(lines(10, max_tokens=100))
    await scene.in_flight(10)
    scene.clock.advance(seconds)
    scene.backend.finish_all()
    return await scene.ends(batch.id)


async def test_errors_of_earlier_batches_correct_the_next_one(tmp_path: Path) -> None:
    """Each takes ten times as long as the rate makes of it; a restart forgets nothing."""
    took_s: list[int] = []
    backend = ScriptedBackend(holds=True, tokens_per_s=100.0)
    async with (scene := await opened(tmp_path, backend)).service:
        for _ in range(20):
            done = await served_in(scene, 100.0)
            took_s.append(done.completed_at - done.created_at)
    backend = ScriptedBackend(holds=True, tokens_per_s=100.0)
    async with (scene := await opened(tmp_path, backend)).service:
        batch = await scene.create(lines(10, max_tokens=100))
        assert batch.coserve.eta is not None and batch.coserve.eta_p95 is not None
        assert 0.9 * min(took_s) <= batch.coserve.eta - batch.created_at <= 1.1 * max(took_s)
        assert batch.coserve.eta <= batch.coserve.eta_p95
        assert batch.coserve.eta_p95 - batch.created_at <= 1.5 * max(took_s)


async def with_history(tmp_path: Path) -> Scene:
    """A service with as many batches behind it as P5 takes; the fastest took half of what the
    others did."""
    scene = await opened(tmp_path, ScriptedBackend(holds=True, tokens_per_s=1.0))
    for took_s in (500.0, *[1000.0] * 18):
        await served_in(scene, took_s)
    return scene


async def test_a_window_that_cannot_be_kept_is_refused_with_one_that_can(tmp_path: Path) -> None:
    async with (scene := await with_history(tmp_path)).service as service:
        file = await scene.upload(lines(10, max_tokens=100))
        with pytest.raises(BatchRequestError, match="P95") as caught:
            await service.create_batch(OWNER, wanted(file, "10s"), "key")
        assert (caught.value.code, caught.value.param) == (
            "window_too_short",
            "completion_window",
        )
        assert len((await service.list_batches(OWNER)).data) == 19
        late = await service.create_batch(OWNER, wanted(file, "10s", best_effort=True))
        assert late.status == "validating"
        await service.change_batch(OWNER, late.id, "cancel")
        await scene.ends(late.id)  # Until then it counts as one that is served first.
        enough = str(caught.value).partition("ask for ")[2].partition(" ")[0]
        batch = await service.create_batch(OWNER, wanted(file, enough))
        assert batch.status == "validating" and batch.coserve.warning is None
        # Unlikely, not impossible: the fastest batch was as fast.
        likely_late = await service.create_batch(OWNER, wanted(file, "15m"))
        assert "after the window of 15m closes" in (likely_late.coserve.warning or "")


@pytest.mark.parametrize("batches", [0, 18])
async def test_without_a_history_no_window_is_refused(tmp_path: Path, batches: int) -> None:
    """A new engine may be a better one than it is believed to be, and answers shorter."""
    backend = ScriptedBackend(holds=True, tokens_per_s=1.0)
    async with (scene := await opened(tmp_path, backend)).service as service:
        for _ in range(batches):
            await served_in(scene, 1000.0)
        file = await scene.upload(lines(10, max_tokens=1_000_000))
        batch = await service.create_batch(OWNER, wanted(file, "10s"))
        assert batch.status == "validating"
        assert "after the window of 10s closes" in (batch.coserve.warning or "")


async def test_a_paused_batch_teaches_nothing(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True, tokens_per_s=100.0)
    async with (scene := await opened(tmp_path, backend)).service as service:
        batch = await scene.create(lines(2))
        await scene.in_flight(2)
        await service.change_batch(OWNER, batch.id, "pause")
        await scene.in_flight(0)
        await service.change_batch(OWNER, batch.id, "resume")
        await scene.in_flight(2)
        backend.finish_all()
        await scene.ends(batch.id)
        assert len(service._runner._past) == 0
