"""Disks that fail, inputs that are gone, bugs: what becomes of a batch."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batch.manual_clock import ManualClock
from batch.scenarios import OWNER, Scene, line, lines, opened
from batch.scripted_backend import ScriptedBackend, answer
from sglang_coserve.batch.state import Progressed
from sglang_coserve.batch.store import batch_rows
from sglang_coserve.errors import StorageError
from sglang_coserve.lines.backend import LineRequest, LineResult


async def test_results_leave_the_room_that_it_takes_to_make_some(tmp_path: Path) -> None:
    scene = await opened(tmp_path, reserved_bytes=1 << 60)
    async with scene.service as service:
        waits, cancelled = await scene.create(lines(3)), await scene.create(lines(3))
        for batch in (waits, cancelled):
            assert "cannot be written: No space left on device" in await scene.warning(batch.id)
        await service.change_batch(OWNER, cancelled.id, "cancel")
        await scene.reaches(cancelled.id, "cancelled")
        await service.delete_file(OWNER, cancelled.input_file_id)
        object.__setattr__(service.context.limits, "reserved_bytes", 1)
        done = await scene.ends(waits.id)
        assert (done.status, done.coserve.warning) == ("completed", None)
        assert len(await scene.records(done)) == 3


@pytest.mark.parametrize("large", ["", "x" * (1 << 17)], ids=["small", "large"])
async def test_a_line_that_cannot_be_served_as_it_was_checked_ends_alone(
    tmp_path: Path, large: str
) -> None:
    scene = await opened(tmp_path)
    async with scene.service as service:
        batch = await scene.create(
            lines(1) + line("id-2", x=large).encode() + b"\n" + line("id-3").encode()
        )
        await service.change_batch(OWNER, batch.id, "pause")
        await scene.reaches(batch.id, "in_progress")
        path = tmp_path / "files" / batch.input_file_id
        content = path.read_bytes()
        at = content.index(b'"id-2", "method"')
        path.write_bytes(content[:at] + content[at:].replace(b'"POST"', b'"PUT" ', 1))
        await service.change_batch(OWNER, batch.id, "resume")
        done = await scene.ends(batch.id)
        assert (done.status, done.coserve.warning) == ("completed", None)
        records = await scene.records(done)
        assert sorted(records) == ["id-1", "id-2", "id-3"]
        answered = records["id-2"]["response"]
        assert answered["status_code"] == 400
        assert "line 2 cannot be read" in answered["body"]["error"]["message"]


async def test_counts_that_no_database_holds_are_as_good_as_none(tmp_path: Path) -> None:
    def answers(request: LineRequest) -> LineResult:
        body = dict(answer(request).body)
        if request.line == 2:
            body["usage"] = {"prompt_tokens": 10**19, "completion_tokens": 2**63 - 1}
        return LineResult(200, "r", body)

    scene = await opened(tmp_path, ScriptedBackend(answers=answers))
    async with scene.service:
        done = await scene.ends((await scene.create(lines(4))).id)
        assert (done.status, done.request_counts.completed) == ("completed", 4)
        assert 2**32 < done.usage.total_tokens < 2**34


async def test_a_batch_that_fails_keeps_the_results_that_could_not_be_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = batch_rows.apply

    def broken(connection: Any, batch_id: str, event: Any, *args: Any, **more: Any) -> Any:
        if isinstance(event, Progressed):
            raise StorageError("cannot count")
        return apply(connection, batch_id, event, *args, **more)

    monkeypatch.setattr(batch_rows, "apply", broken)
    scene = await opened(tmp_path)
    async with scene.service as service:
        batch = await scene.create(lines(3))
        assert "cannot count" in await scene.warning(batch.id)
        await service.change_batch(OWNER, batch.id, "cancel")
        done = await scene.ends(batch.id)
        assert done.status == "failed"
        assert 0 < done.request_counts.completed == len(await scene.records(done))


async def test_an_input_that_is_gone_is_named_and_can_be_cancelled(tmp_path: Path) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True), max_in_flight=2)
    async with scene.service as service:
        batch = await scene.create(lines(2000))
        await scene.in_flight(2)
        (tmp_path / "files" / batch.input_file_id).unlink()
        scene.backend.holds = False
        scene.backend.finish_all()

        warning = await scene.warning(batch.id)
        assert "No such file" in warning
        assert f"files/{batch.input_file_id}" in warning and str(tmp_path) not in warning
        await service.change_batch(OWNER, batch.id, "cancel")
        done = await scene.ends(batch.id)
        assert done.status == "cancelled"
        assert 0 < done.request_counts.completed < 2000


async def test_a_bug_stops_one_batch_and_leaves_it_in_its_owners_hands(tmp_path: Path) -> None:
    def answers(request: LineRequest) -> LineResult:
        return LineResult(200, "r", {"not": object()}) if request.line == 2 else answer(request)

    async with (scene := await opened(tmp_path, ScriptedBackend(answers=answers))).service:
        service = scene.service
        batches = [await scene.create(lines(3)) for _ in range(2)]
        for batch in batches:
            assert "internal error: TypeError;" in await scene.warning(batch.id)
        await service.change_batch(OWNER, batches[0].id, "cancel")
        assert (await scene.ends(batches[0].id)).status == "cancelled"
        scene.backend.answers = answer
        await service.change_batch(OWNER, batches[1].id, "resume")
        done = await scene.ends(batches[1].id)
        assert (done.status, done.request_counts.completed) == ("completed", 3)
        assert (await service.status()).lines_in_flight == 0


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_disk_that_fails_for_good_fails_the_batch_in_the_end(
    tmp_path: Path, is_cancelled: bool
) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True), max_in_flight=1)
    async with scene.service as service:
        batch = await scene.create(lines(3), "1h")
        await scene.in_flight(1)
        scene.backend.held("id-1").finish()
        await scene.clock.until(lambda: len(scene.backend.started) == 2)

        output_file_id = (await scene.once(batch.id, lambda now: now.output_file_id)).output_file_id
        (tmp_path / "files" / str(output_file_id)).unlink()
        if is_cancelled:
            await service.change_batch(OWNER, batch.id, "cancel")
        else:
            scene.clock.advance(3600)
        done = await scene.ends(batch.id)
        assert done.status == "failed"
        (fault,) = done.errors.data
        assert fault.code == "storage_failed"
        assert "is gone" in fault.message
        for kept in ("journal", "order"):
            assert not list((tmp_path / kept).iterdir())


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0 * 3650])
async def test_a_clock_that_is_set_does_not_stop_what_is_being_served(
    tmp_path: Path, jump_s: float
) -> None:
    """Deadlines follow the clock; what is served is served, and nothing hangs."""
    scene = await opened(tmp_path, ScriptedBackend(holds=True), max_in_flight=2)
    async with scene.service as service:
        batch = await scene.create(lines(5))
        await scene.in_flight(2)
        set_clock(scene, jump_s)
        scene.backend.holds = False
        scene.backend.finish_all()
        done = await scene.ends(batch.id)
        assert done.status == "completed"
        assert done.request_counts.completed == 5
        after = await scene.create(lines(2))
        assert (await scene.ends(after.id)).status == "completed"
        assert [each.id for each in (await service.list_batches(OWNER)).data] == [
            after.id,
            batch.id,
        ]


async def test_a_window_closes_by_the_clock_though_it_was_set(tmp_path: Path) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True))
    async with scene.service as service:
        served, paused = await scene.create(lines(1)), await scene.create(lines(1))
        await scene.in_flight(2)
        await service.change_batch(OWNER, paused.id, "pause")
        set_clock(scene, 90_000.0)
        before_s = scene.clock.now_s()
        for batch in (served, paused):
            await scene.reaches(batch.id, "expired")
        assert scene.clock.now_s() - before_s < 120


def set_clock(scene: Scene, jump_s: float) -> None:
    """Set it: time does not pass, and nobody who sleeps is woken by that."""
    scene.clock._now_s += jump_s
    scene.clock._sleepers = [
        (at_s + jump_s, order, woken) for at_s, order, woken in scene.clock._sleepers
    ]


async def test_a_last_answer_that_a_crash_left_uncounted_counts_after_the_window(
    tmp_path: Path,
) -> None:
    async with (scene := await opened(tmp_path)).service:
        batch = await scene.create(lines(3), "1h")
        await scene.ends(batch.id)
    with closing(sqlite3.connect(tmp_path / "coserve.sqlite")) as db, db:
        db.execute(
            "UPDATE batches SET record = json_remove(json_set(record, '$.status', 'in_progress'),"
            " '$.completed_at_s', '$.finalizing_at_s', '$.progress')"
        )
    clock = ManualClock(scene.clock.now_s() + 7200)
    async with (scene := await opened(tmp_path, clock=clock)).service:
        done = await scene.ends(batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 3)
        assert len(await scene.records(done)) == 3
