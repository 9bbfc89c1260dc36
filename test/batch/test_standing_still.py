"""What a batch waits for, as its owner is told."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from batch.scenarios import OWNER, Scene, lines, opened
from batch.scripted_backend import ScriptedBackend, failure
from batch.test_engine_deaths import died_of_three_lines
from sglang_coserve.batch.schemas import BatchObject
from sglang_coserve.batch.store import file_rows


async def told(scene: Scene, batch_id: str, reason: str | None) -> BatchObject:
    """The batch once it waits for ``reason``."""
    return await scene.once(batch_id, lambda batch: batch.coserve.waiting_for == reason)


async def test_from_its_check_to_its_end(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True)
    scene = await opened(tmp_path, backend, max_in_flight=2)
    async with scene.service as service:
        batch = await scene.create(lines(3))
        assert batch.coserve.waiting_for == "check"
        assert (batch.coserve.lines_in_flight, batch.coserve.last_record_at) == (0, None)
        await scene.in_flight(2)
        runs = (await service.retrieve_batch(OWNER, batch.id)).coserve
        assert (runs.waiting_for, runs.lines_in_flight, runs.last_record_at) == (None, 2, None)
        paused = await service.change_batch(OWNER, batch.id, "pause")
        assert paused.coserve.waiting_for == "paused"
        await scene.in_flight(0)
        assert (await told(scene, batch.id, "paused")).coserve.lines_in_flight == 0
        await service.change_batch(OWNER, batch.id, "resume")
        await scene.in_flight(2)
        at_s = scene.clock.now_s()
        backend.in_flight[0].finish()
        one = await scene.once(batch.id, lambda batch: batch.request_counts.completed)
        assert at_s - 1 < (one.coserve.last_record_at or 0) <= scene.clock.now_s()
        backend.holds = False
        backend.finish_all()
        done = (await scene.ends(batch.id)).coserve
        assert (done.waiting_for, done.lines_in_flight) == (None, 0)
        assert done.last_record_at is not None


async def test_for_a_slot(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True)
    scene = await opened(tmp_path, backend, max_in_flight=1)
    async with scene.service:
        first = await scene.create(lines(1), "1h")
        await scene.in_flight(1)
        second = await scene.create(lines(1))
        assert (await told(scene, second.id, "slot")).coserve.lines_in_flight == 0
        assert (await told(scene, first.id, None)).coserve.lines_in_flight == 1
        backend.finish_all()
        await told(scene, second.id, None)
        backend.finish_all()
        await scene.ends(second.id)


async def test_for_an_engine_that_takes_no_lines_or_has_failed_on_them(tmp_path: Path) -> None:
    backend = ScriptedBackend(answers=lambda _: failure(503, is_retryable=True))
    scene = await opened(tmp_path, backend)
    async with scene.service:
        batch = await scene.create(lines(1))
        await told(scene, batch.id, "engine")  # It waits for its next attempt.
        backend.holds = True
        await scene.in_flight(1)
        await told(scene, batch.id, None)
        backend.stalled_by = "no engine is up"
        assert (await told(scene, batch.id, "engine")).coserve.warning == "no engine is up"
        backend.stalled_by = None
        backend.finish_all()
        await scene.ends(batch.id)


async def test_for_another_model(tmp_path: Path) -> None:
    backend = ScriptedBackend(is_changing=True)
    scene = await opened(tmp_path, backend)
    async with scene.service:
        batch = await scene.create(lines(1))
        await told(scene, batch.id, "model")
        backend.is_changing = False
        await scene.ends(batch.id)


async def test_for_a_line_that_may_have_crashed_the_engine(tmp_path: Path) -> None:
    suspects = await died_of_three_lines(tmp_path)
    backend = ScriptedBackend(holds=True)
    scene = await opened(tmp_path, backend)
    async with scene.service:
        batch = await scene.create(lines(2))
        await told(scene, batch.id, "suspect")
        shown = await told(scene, suspects.id, None)
        assert shown.coserve.lines_in_flight == 1, "one of its suspects, alone"
        backend.holds = False
        backend.finish_all()
        await scene.ends(suspects.id)
        await scene.ends(batch.id)


async def test_for_the_disk(tmp_path: Path) -> None:
    scene = await opened(tmp_path, reserved_bytes=1 << 60)
    async with scene.service as service:
        batch = await scene.create(lines(3))
        await told(scene, batch.id, "disk")
        object.__setattr__(service.context.limits, "reserved_bytes", 1)
        await scene.ends(batch.id)


async def test_a_batch_that_is_paused_waits_for_the_disk_no_more(tmp_path: Path) -> None:
    scene = await opened(tmp_path, reserved_bytes=1 << 60)
    async with scene.service as service:
        batch = await scene.create(lines(3))
        await told(scene, batch.id, "disk")
        paused = await service.change_batch(OWNER, batch.id, "pause")
        assert paused.coserve.waiting_for == "paused"
        await scene.once(batch.id, lambda batch: batch.coserve.warning is None)
        await service.change_batch(OWNER, batch.id, "resume")
        await told(scene, batch.id, "disk")
        object.__setattr__(service.context.limits, "reserved_bytes", 1)
        await scene.ends(batch.id)


async def test_for_another_attempt_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await opened(tmp_path, ScriptedBackend())
    async with scene.service as service:
        with monkeypatch.context() as patched:
            patched.setattr(service.context.backend, "settled", None)
            batch = await scene.create(lines(1))
            await told(scene, batch.id, "error")
        await scene.ends(batch.id)


MIB = 1 << 20


async def test_for_room_in_the_quota_while_others_go_on(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True)
    scene = await opened(
        tmp_path, backend, max_in_flight=4, max_stored_bytes_per_owner=MIB, tight_free_bytes=1
    )
    async with scene.service as service:
        kept = await scene.upload(bytes(MIB - 20_000))
        greedy = await scene.create(lines(100, "greedy", max_tokens=8))
        answered = 0
        while not held(scene):
            await scene.clock.until(lambda: len(backend.in_flight) == 4 or held(scene))
            answered += len(backend.in_flight)
            backend.finish_all()
            count = answered
            await scene.once(greedy.id, lambda b, n=count: b.request_counts.completed == n)  # type: ignore[misc]
            scene.clock.advance(1.0)
            await asyncio.sleep(0.01)
        backend.finish_all()
        waits = await told(scene, greedy.id, "quota")
        assert "files, and may have 1,048,576" in (waits.coserve.warning or "")
        begun = [request.batch_id for request in backend.started].count(greedy.id)
        assert begun < 100
        modest = await scene.create(lines(40, "modest"), owner="modest")
        backend.holds = False
        backend.finish_all()
        done = await scene.reaches(modest.id, "completed", owner="modest")
        assert done.request_counts.completed == 40
        await scene.upload(bytes(MIB // 2), "modest")
        still = await told(scene, greedy.id, "quota")
        assert still.request_counts.completed <= begun
        assert [request.batch_id for request in backend.started].count(greedy.id) == begun
        backend.holds = True
        await service.delete_file(OWNER, kept.id)
        await scene.in_flight(4)
        await told(scene, greedy.id, None)


def held(scene: Scene) -> bool:
    return OWNER in scene.service.context.slots.held


async def test_a_quota_holds_from_the_start_and_until_a_batch_ends(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True)
    scene = await opened(tmp_path, backend)
    async with scene.service:
        batch = await scene.create(lines(2))
        await scene.in_flight(2)
    scene = await opened(tmp_path, backend, max_stored_bytes_per_owner=1)
    async with scene.service as service:
        waits = await told(scene, batch.id, "quota")
        assert "cancel a batch or delete files" in (waits.coserve.warning or "")
        assert not backend.in_flight
        await service.change_batch(OWNER, batch.id, "cancel")
        await scene.ends(batch.id)
        await scene.clock.until(lambda: not held(scene))


async def test_who_is_held_takes_no_part_in_forecasts(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True, tokens_per_s=100.0)
    scene = await opened(tmp_path, backend)
    async with scene.service:
        large = await scene.create(lines(50, max_tokens=1000))
        await scene.reaches(large.id, "in_progress")
        small = await scene.create(lines(5, max_tokens=1000), owner="small")
        await scene.reaches(small.id, "in_progress", owner="small")
    scene = await opened(tmp_path, backend, max_stored_bytes_per_owner=3000)
    async with scene.service as service:
        held_back = await told(scene, large.id, "quota")
        assert held_back.coserve.eta is None
        left_s = 5 * (1000 + 100 / 4) / 100.0
        eta = (await service.retrieve_batch("small", small.id)).coserve.eta
        assert eta is not None and eta - scene.clock.now_s() == pytest.approx(left_s, rel=0.05)
        assert service.runner.headroom().required_tokens_per_s < 1.0


async def test_no_commit_waits_for_the_sums_of_quotas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True), max_stored_bytes_per_owner=MIB)
    async with scene.service:
        await scene.create(lines(2))
        threads = []

        def stored(*_: object) -> tuple[int, int]:
            threads.append(threading.current_thread().name)
            return 2 * MIB, 1

        monkeypatch.setattr(file_rows, "stored", stored)
        scene.service.runner._written_bytes.clear()
        await scene.clock.until(lambda: held(scene))
        assert all(name.startswith("coserve-lists") for name in threads)


async def test_owners_without_a_quota_wait_before_the_disk_is_full(tmp_path: Path) -> None:
    """The owner who has more than is free waits; the others have what is left."""
    backend = ScriptedBackend(holds=True)
    scene = await opened(tmp_path, backend)
    async with scene.service as service:
        large, small = await scene.create(lines(20)), await scene.create(lines(2), owner="small")
        await scene.in_flight(22)
        await scene.upload(bytes(9000))
        service.context.directory.room.free_bytes = lambda *_: 9000  # type: ignore[method-assign]
        await scene.clock.until(lambda: held(scene))
        assert service.context.slots.held.keys() == {OWNER}
        assert (await told(scene, large.id, None)).coserve.lines_in_flight == 20
        assert (await service.retrieve_batch("small", small.id)).coserve.warning is None
