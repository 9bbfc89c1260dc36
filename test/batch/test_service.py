"""What becomes of a batch, told from outside."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from pydantic import ValidationError

from batch.manual_clock import ManualClock
from batch.scenarios import OWNER, Scene, line, lines, opened, play, stream, wanted
from batch.scripted_backend import ENDPOINT, ScriptedBackend, answer, failure, tokens_of
from sglang_coserve.batch import (
    BatchObject,
    BatchRequestError,
    ConflictError,
    CreateBatch,
    LineRequest,
    LineResult,
    NotFoundError,
    TooManyError,
)


def test_a_batch_from_upload_to_output(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (scene := await opened(tmp_path)).service:
            file = await scene.upload(lines(3, max_tokens=5))
            request = wanted(file, "2h")
            request.metadata = {"project": "x"}
            batch = await scene.service.create_batch(OWNER, request)
            assert batch.status == "validating"
            assert batch.expires_at - batch.created_at == 7200
            assert (batch.output_file_id, batch.error_file_id, batch.errors) == (None, None, None)
            done = await scene.ends(batch.id)
            assert done.status == "completed"
            assert done.metadata == {"project": "x"}
            assert done.request_counts.model_dump() == {"total": 3, "completed": 3, "failed": 0}
            assert (done.usage.input_tokens, done.usage.output_tokens) == (9, 15)
            times = [done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at]
            assert None not in times and times == sorted(times)  # type: ignore[type-var]
            assert done.error_file_id is None
            records = await scene.records(done)
            assert set(records) == {"id-1", "id-2", "id-3"}
            for custom_id, record in records.items():
                assert record["id"].startswith("batch_req_")
                assert record["error"] is None
                response = record["response"]
                assert (response["status_code"], response["request_id"]) == (
                    200,
                    f"cmpl-{custom_id}",
                )
                text = response["body"]["choices"][0]["text"]
                assert text == " ".join(map(str, tokens_of(custom_id, 5)))
            assert done.output_file_id
            output = await scene.service.retrieve_file(OWNER, done.output_file_id)
            assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
            deadlines = {int(request.deadline_s) for request in scene.backend.started}
            assert deadlines == {done.expires_at}

    play(scenario())


def test_a_malformed_file_fails_with_its_lines_and_reaches_no_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (scene := await opened(tmp_path)).service:
            content = f"{line('a')}\n{{\n{line('a')}\n".encode()
            failed = await scene.ends((await scene.create(content)).id)
            assert failed.status == "failed"
            assert failed.failed_at is not None
            assert failed.errors is not None
            faults = [(fault.code, fault.line) for fault in failed.errors.data]
            assert faults == [("invalid_json", 2), ("duplicate_custom_id", 3)]
            assert (failed.output_file_id, failed.request_counts.total) == (None, 0)
            assert scene.backend.started == []

    play(scenario())


def test_a_line_that_cannot_be_served_fails_alone(tmp_path: Path) -> None:
    def answers(request: LineRequest) -> LineResult:
        return failure(400) if request.custom_id == "id-2" else answer(request)

    async def scenario() -> None:
        backend = ScriptedBackend(answers=answers)
        async with (scene := await opened(tmp_path, backend)).service:
            content = lines(3) + line("streams", stream=True).encode()
            done = await scene.ends((await scene.create(content)).id)
            assert done.status == "completed"
            assert done.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
            assert done.error_file_id
            assert (await scene.content(done.error_file_id)).count(b"\n") == 2
            records = await scene.records(done)
            for custom_id, message in (("id-2", "no"), ("streams", "cannot stream")):
                response = records[custom_id]["response"]
                assert response["status_code"] == 400
                assert message in response["body"]["error"]["message"]
            assert "streams" not in {request.custom_id for request in scene.backend.started}

    play(scenario())


def test_engine_failures_are_retried_within_limits(tmp_path: Path) -> None:
    attempts: Counter[str] = Counter()

    def answers(request: LineRequest) -> LineResult:
        attempts[request.custom_id] += 1
        if request.custom_id == "id-1" and attempts["id-1"] < 3:
            return failure(503, is_retryable=True)
        if request.custom_id == "id-2":
            raise RuntimeError("out of memory")
        return answer(request)

    async def scenario() -> None:
        backend = ScriptedBackend(answers=answers)
        async with (scene := await opened(tmp_path, backend, max_attempts=4)).service:
            done = await scene.ends((await scene.create(lines(3))).id)
            assert done.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
            assert attempts == {"id-1": 3, "id-2": 4, "id-3": 1}
            response = (await scene.records(done))["id-2"]["response"]
            assert response["status_code"] == 500
            assert "out of memory" in response["body"]["error"]["message"]

    play(scenario())


def test_a_retry_continues_from_what_was_generated(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = await opened(tmp_path, ScriptedBackend(holds=True))
        async with scene.service:
            batch = await scene.create(lines(1, max_tokens=9))
            await scene.in_flight(1)
            entry = scene.backend.held("id-1")
            entry.generate(3)
            entry.generate(2)
            entry.finish(failure(500, is_retryable=True))
            await scene.clock.until(lambda: len(scene.backend.started) == 2)
            assert list(scene.backend.started[1].generated) == tokens_of("id-1", 5)
            await scene.in_flight(1)
            scene.backend.held("id-1").finish()
            assert (await scene.ends(batch.id)).request_counts.completed == 1

    play(scenario())


def test_partial_output_is_readable_while_the_batch_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = await opened(tmp_path, ScriptedBackend(holds=True))
        async with scene.service as service:
            batch = await scene.create(lines(4))
            await scene.in_flight(4)
            scene.backend.held("id-2").finish()
            scene.backend.held("id-3").finish(failure(400))

            async def two_lines() -> BatchObject | None:
                now = await service.retrieve_batch(OWNER, batch.id)
                return (
                    now if now.request_counts.completed + now.request_counts.failed == 2 else None
                )

            now = await scene.eventually(two_lines)
            assert now.status == "in_progress"
            assert set(await scene.records(now)) == {"id-2", "id-3"}
            for entry in list(scene.backend.in_flight):
                entry.finish()
            assert len(await scene.records(await scene.ends(batch.id))) == 4

    play(scenario())


def test_cancelling_keeps_what_is_finished_and_aborts_the_rest(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = await opened(tmp_path, ScriptedBackend(holds=True), max_in_flight=3)
        async with scene.service as service:
            batch = await scene.create(lines(10))
            other = await scene.create(lines(1, "other"))
            await scene.in_flight(3)
            scene.backend.held("id-1").finish()
            await scene.clock.until(lambda: len(scene.backend.started) >= 4)
            cancelling = await service.cancel_batch(OWNER, batch.id)
            assert cancelling.status == "cancelling"
            assert cancelling.cancelling_at is not None
            assert (await service.cancel_batch(OWNER, batch.id)).status in (
                "cancelling",
                "cancelled",
            )
            done = await scene.ends(batch.id)
            assert done.status == "cancelled"
            assert set(await scene.records(done)) == {"id-1"}
            assert done.request_counts.model_dump() == {"total": 10, "completed": 1, "failed": 0}
            assert {r.batch_id for r in scene.backend.aborted} == {batch.id}
            await scene.clock.until(lambda: bool(scene.backend.in_flight))
            scene.backend.held("other-1").finish()
            assert (await scene.ends(other.id)).status == "completed"
            for call in (service.cancel_batch, service.pause_batch, service.resume_batch):
                with pytest.raises(ConflictError, match="it is cancelled"):
                    await call(OWNER, batch.id)
            assert scene.service.status().lines_in_flight == 0

    play(scenario())


def test_a_batch_can_be_cancelled_before_it_is_checked(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (scene := await opened(tmp_path)).service as service:
            batch = await scene.create(lines(20_000))
            assert (await service.cancel_batch(OWNER, batch.id)).status == "cancelling"
            assert (await scene.ends(batch.id)).status == "cancelled"
            assert scene.backend.started == []

    play(scenario())


def test_a_paused_batch_leaves_the_engine_and_comes_back_where_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = await opened(tmp_path, ScriptedBackend(holds=True))
        async with scene.service as service:
            batch = await scene.create(lines(2, max_tokens=20))
            await scene.in_flight(2)
            scene.backend.held("id-1").generate(7)
            paused = await service.pause_batch(OWNER, batch.id)
            assert (paused.status, paused.coserve.paused) == ("in_progress", True)
            await scene.in_flight(0)
            await service.pause_batch(OWNER, batch.id)
            resumed = await service.resume_batch(OWNER, batch.id)
            assert not resumed.coserve.paused
            await scene.in_flight(2)
            assert scene.backend.held("id-1").generated == 7
            assert scene.backend.held("id-2").generated == 0
            for entry in list(scene.backend.in_flight):
                entry.finish()
            assert (await scene.ends(batch.id)).request_counts.completed == 2

    play(scenario())


def test_a_batch_may_be_paused_before_it_is_checked(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (scene := await opened(tmp_path)).service as service:
            batch = await scene.create(lines(1))
            await service.pause_batch(OWNER, batch.id)
            await scene.reaches(batch.id, "in_progress")
            scene.clock.advance(10)
            assert scene.backend.started == []
            await service.resume_batch(OWNER, batch.id)
            assert (await scene.ends(batch.id)).status == "completed"

    play(scenario())


@pytest.mark.parametrize("is_paused", [False, True])
def test_an_expired_batch_keeps_what_is_finished_and_names_the_rest(
    tmp_path: Path, is_paused: bool
) -> None:
    async def scenario() -> None:
        scene = await opened(tmp_path, ScriptedBackend(holds=True), max_in_flight=2)
        async with scene.service as service:
            batch = await scene.create(lines(5), "30m")
            await scene.in_flight(2)
            scene.backend.held("id-2").finish()
            await scene.clock.until(lambda: len(scene.backend.started) == 3)
            if is_paused:
                await service.pause_batch(OWNER, batch.id)
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

    play(scenario())


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


def test_a_failing_disk_stops_a_batch_until_it_is_mended(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = await opened(tmp_path, ScriptedBackend(holds=True))
        async with scene.service as service:
            batch = await scene.create(lines(3))
            await scene.in_flight(3)
            # Nothing can be written where a directory is.
            record = await scene.service._context.store.run(
                lambda db: db.execute("SELECT output_file_id FROM batches").fetchone()
            )
            obstacle = tmp_path / "files" / record[0]
            obstacle.mkdir()
            for entry in list(scene.backend.in_flight):
                entry.finish()

            async def warned() -> BatchObject | None:
                now = await service.retrieve_batch(OWNER, batch.id)
                return now if now.coserve.warning else None

            stuck = await scene.eventually(warned)
            assert stuck.status == "in_progress"
            assert "cannot be written: Is a directory" in (stuck.coserve.warning or "")
            scene.backend.holds = False
            obstacle.rmdir()
            done = await scene.ends(batch.id)
            assert done.status == "completed"
            assert done.coserve.warning is None
            assert len(await scene.records(done)) == 3

    play(scenario())


def test_an_input_that_is_gone_is_named_and_can_be_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = await opened(tmp_path, ScriptedBackend(holds=True), max_in_flight=2)
        async with scene.service as service:
            batch = await scene.create(lines(2000))
            await scene.in_flight(2)
            (tmp_path / "files" / batch.input_file_id).unlink()
            scene.backend.holds = False
            for entry in list(scene.backend.in_flight):
                entry.finish()

            async def warned() -> BatchObject | None:
                now = await service.retrieve_batch(OWNER, batch.id)
                return now if now.coserve.warning else None

            assert "No such file" in ((await scene.eventually(warned)).coserve.warning or "")
            await service.cancel_batch(OWNER, batch.id)
            done = await scene.ends(batch.id)
            assert done.status == "cancelled"
            assert 0 < done.request_counts.completed < 2000

    play(scenario())


def test_a_bug_stops_one_batch_and_leaves_it_in_its_owners_hands(tmp_path: Path) -> None:
    def answers(request: LineRequest) -> LineResult:
        return LineResult(200, "r", {"not": object()}) if request.line == 2 else answer(request)

    async def scenario() -> None:
        async with (scene := await opened(tmp_path, ScriptedBackend(answers=answers))).service:
            service = scene.service
            batches = [await scene.create(lines(3)) for _ in range(2)]
            for batch in batches:

                async def warned(batch_id: str = batch.id) -> BatchObject | None:
                    now = await service.retrieve_batch(OWNER, batch_id)
                    return now if now.coserve.warning else None

                assert "internal error" in ((await scene.eventually(warned)).coserve.warning or "")
            await service.cancel_batch(OWNER, batches[0].id)
            assert (await scene.ends(batches[0].id)).status == "cancelled"
            scene.backend.answers = answer
            await service.resume_batch(OWNER, batches[1].id)
            done = await scene.ends(batches[1].id)
            assert (done.status, done.request_counts.completed) == ("completed", 3)
            assert service.status().lines_in_flight == 0

    play(scenario())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_disk_that_fails_for_good_fails_the_batch_in_the_end(
    tmp_path: Path, is_cancelled: bool
) -> None:
    async def scenario() -> None:
        scene = await opened(tmp_path, ScriptedBackend(holds=True), max_in_flight=1)
        async with scene.service as service:
            batch = await scene.create(lines(3), "1h")
            await scene.in_flight(1)
            scene.backend.held("id-1").finish()
            await scene.clock.until(lambda: len(scene.backend.started) == 2)

            async def written() -> BatchObject | None:
                now = await service.retrieve_batch(OWNER, batch.id)
                return now if now.output_file_id else None

            output_file_id = (await scene.eventually(written)).output_file_id
            (tmp_path / "files" / str(output_file_id)).unlink()
            if is_cancelled:
                await service.cancel_batch(OWNER, batch.id)
            else:
                scene.clock.advance(3600)
            done = await scene.ends(batch.id)
            assert done.status == "failed"
            assert done.errors is not None
            (fault,) = done.errors.data
            assert fault.code == "storage_failed"
            assert "is gone" in fault.message

    play(scenario())


def test_the_engine_never_has_more_than_it_may(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = await opened(
            tmp_path, ScriptedBackend(holds=True), max_in_flight=8, max_in_flight_bytes=2000
        )
        async with scene.service:
            small = await scene.create(lines(40))
            await scene.in_flight(8)
            large = await scene.create(lines(5, "x" * 900))
            while len(scene.backend.started) < 45 or scene.backend.in_flight:
                await scene.clock.until(lambda: bool(scene.backend.in_flight))
                status = scene.service.status()
                assert status.lines_in_flight <= 8
                assert status.bytes_in_flight <= 2000 or status.lines_in_flight == 1
                scene.backend.in_flight[0].finish()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if len(scene.backend.started) == 20:
                    scene.backend.max_in_flight = 2
            for batch in (small, large):
                assert (await scene.ends(batch.id)).status == "completed"

    play(scenario())


def test_batches_share_by_weight_and_priority(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = await opened(tmp_path, ScriptedBackend(holds=True), max_in_flight=1)
        async with scene.service:
            await scene.create(lines(30, "first"))
            await scene.in_flight(1)
            for prefix, options in (
                ("heavy", {"weight": 3.0}),
                ("light", {"weight": 1.0}),
                ("high", {"priority": 1}),
            ):
                batch = await scene.create(lines(30, prefix), **options)
                await scene.reaches(batch.id, "in_progress")
            slots = scene.service._context.slots
            await scene.clock.until(lambda: len(slots._waiting) == 4, "every batch waits")
            for count in range(2, 82):
                scene.backend.in_flight[0].finish()
                await scene.clock.until(lambda n=count: len(scene.backend.started) == n)  # type: ignore[misc]
            order = [request.custom_id.split("-")[0] for request in scene.backend.started]
            assert order[1:31] == ["high"] * 30
            shares = Counter(order[31:71])
            assert shares["heavy"] == pytest.approx(3 * shares["light"], abs=3)
            assert shares["first"] == pytest.approx(shares["light"], abs=2)

    play(scenario())


def test_the_object_says_when_it_will_be_complete(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = ScriptedBackend(holds=True, tokens_per_s=10.0)
        async with (scene := await opened(tmp_path, backend)).service as service:
            batch = await scene.create(lines(10, max_tokens=100), "60s")
            await scene.in_flight(10)
            now = await service.retrieve_batch(OWNER, batch.id)
            assert now.coserve.eta is not None
            assert now.coserve.eta > now.expires_at
            assert now.coserve.rate_tokens_per_s == 10.0
            assert "after the window of 60s closes" in (now.coserve.warning or "")
            scene.backend.tokens_per_s = 1000.0
            now = await service.retrieve_batch(OWNER, batch.id)
            assert now.coserve.warning is None
            await service.cancel_batch(OWNER, batch.id)
            assert (await scene.ends(batch.id)).coserve.eta is None

    play(scenario())


def test_a_window_that_tightens_moves_its_lines_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = ScriptedBackend(holds=True, tokens_per_s=10.0)
        async with (scene := await opened(tmp_path, backend, max_in_flight=1)).service:
            # About 110 tokens a line: 110 s for the first, 220 s for both.
            await scene.create(lines(10, "first", max_tokens=100))
            await scene.in_flight(1)
            tight = await scene.create(lines(10, "tight", max_tokens=100), "140s", priority=-1)
            await scene.reaches(tight.id, "in_progress")
            slots = scene.service._context.slots
            await scene.clock.until(lambda: len(slots._waiting) == 2, "both wait")
            await scene.clock.until(lambda: any(lane.is_urgent for lane in slots._lanes))
            for count in range(2, 6):
                scene.backend.in_flight[0].finish()
                await scene.clock.until(lambda n=count: len(scene.backend.started) == n)  # type: ignore[misc]
            order = [request.custom_id for request in scene.backend.started]
            assert order == ["first-1", "tight-1", "tight-2", "tight-3", "tight-4"]

    play(scenario())


def test_a_caller_who_hangs_up_leaves_no_batch_without_a_driver(tmp_path: Path) -> None:
    async def scenario() -> None:
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

    play(scenario())


def test_a_repeated_request_with_its_key_is_the_same_batch(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (scene := await opened(tmp_path)).service as service:
            file = await scene.upload(lines(1))
            first = await service.create_batch(OWNER, wanted(file), "key")
            again = await service.create_batch(OWNER, wanted(file), "key")
            other = await service.create_batch(OWNER, wanted(file), "another")
            assert first.id == again.id != other.id
            with pytest.raises(ConflictError) as caught:
                await service.create_batch(OWNER, wanted(file, "1h"), "key")
            assert caught.value.code == "idempotency_conflict"
            await scene.ends(first.id)
            after = await service.create_batch(OWNER, wanted(file), "key")
            assert (after.id, after.status) == (first.id, "completed")
            for key in ("", "x" * 256):
                with pytest.raises(BatchRequestError):
                    await service.create_batch(OWNER, wanted(file), key)

    play(scenario())


def test_batches_that_cannot_be_created(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = await opened(tmp_path, ScriptedBackend(holds=True), max_active_batches=1)
        async with scene.service as service:
            file = await scene.upload(lines(1))
            request = wanted(file)
            request.endpoint = "/v1/embeddings"
            with pytest.raises(BatchRequestError, match=f"/v1/chat/completions, {ENDPOINT}"):
                await service.create_batch(OWNER, request)
            with pytest.raises(BatchRequestError, match="completion_window"):
                await service.create_batch(OWNER, wanted(file, "forever"))
            with pytest.raises(NotFoundError):
                await service.create_batch(OWNER, wanted("file-unknown"))
            await service.create_batch(OWNER, wanted(file))
            with pytest.raises(TooManyError):
                await service.create_batch(OWNER, wanted(file))

    play(scenario())


@pytest.mark.parametrize(
    "bad",
    [
        {"metadata": {f"k{n}": "" for n in range(17)}},
        {"metadata": {"k" * 65: ""}},
        {"metadata": {"k": "v" * 513}},
        {"metadata": {"k": 1}},
        {"metadata": {"k": "v" * 16_384}},
        {"output_expires_after": {"anchor": "created_at", "seconds": 3599}},
        {"output_expires_after": {"anchor": "finished_at", "seconds": 3600}},
        {"coserve": {"priority": 101}},
        {"coserve": {"weight": 0}},
        {"coserve": {"weight": float("nan")}},
        {"coserve": {"unknown": 1}},
        {"unknown": 1},
        {"input_file_id": None},
    ],
)
def test_requests_that_mean_nothing(bad: dict[str, object]) -> None:
    good = {"input_file_id": "file-1", "endpoint": ENDPOINT, "completion_window": "24h"}
    CreateBatch.model_validate(good | {"metadata": {"k" * 64: "v" * 512}})
    with pytest.raises(ValidationError):
        CreateBatch.model_validate(good | bad)


def test_pages(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (scene := await opened(tmp_path)).service as service:
            ids = [(await scene.create(lines(1))).id for _ in range(5)]
            page = await service.list_batches(OWNER, limit=2)
            assert [batch.id for batch in page.data] == ids[:2:-1]
            assert (page.first_id, page.last_id, page.has_more) == (ids[4], ids[3], True)
            page = await service.list_batches(OWNER, after=ids[1], limit=2)
            assert ([batch.id for batch in page.data], page.has_more) == ([ids[0]], False)
            empty = await service.list_batches("somebody else")
            assert (empty.data, empty.first_id, empty.has_more) == ([], None, False)
            files = await service.list_files(OWNER, limit=1, order="asc", purpose="batch")
            assert (len(files.data), files.has_more) == (1, True)
            assert (await service.list_files(OWNER, purpose="vision")).data == []
            for limit in (-1, 0, 101):
                with pytest.raises(BatchRequestError, match="limit must be from 1 to 100"):
                    await service.list_batches(OWNER, limit=limit)
            with pytest.raises(BatchRequestError, match="order"):
                await service.list_files(OWNER, order="sideways")
            with pytest.raises(NotFoundError):
                await service.list_batches("somebody else", after=ids[0])
            for batch_id in ids:
                await scene.ends(batch_id)

    play(scenario())


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


def test_the_input_may_be_used_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (scene := await opened(tmp_path)).service as service:
            file = await service.create_file(OWNER, "a", "batch", stream(lines(2)))
            batches = [await service.create_batch(OWNER, wanted(file)) for _ in range(3)]
            for batch in batches:
                assert len(await scene.records(await scene.ends(batch.id))) == 2

    play(scenario())


def test_a_service_on_nothing_starts_and_stops(tmp_path: Path) -> None:
    async def scenario() -> Scene:
        scene = await opened(tmp_path)
        await scene.service.close()
        return scene

    for _ in range(2):
        assert play(scenario()).backend.started == []
