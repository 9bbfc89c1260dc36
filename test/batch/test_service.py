"""What a batch gives, from upload to output, told from outside."""

from __future__ import annotations

import asyncio
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from batch.scenarios import line, lines, opened
from batch.scripted_backend import ScriptedBackend, answer, failure, name_of, tokens_of
from sglang_coserve.lines.backend import LineRequest, LineResult


async def test_a_line_that_cannot_be_served_fails_alone(tmp_path: Path) -> None:
    def answers(request: LineRequest) -> LineResult:
        return failure(400) if name_of(request) == "id-2" else answer(request)

    backend = ScriptedBackend(answers=answers)
    async with (scene := await opened(tmp_path, backend)).service:
        content = lines(2) + b"\n \t\n" + line("id-3").encode()
        done = await scene.ends((await scene.create(content)).id)
        assert done.status == "completed"
        assert done.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        assert done.error_file_id
        assert (await scene.content(done.error_file_id)).count(b"\n") == 1
        response = (await scene.records(done))["id-2"]["response"]
        assert (response["status_code"], response["body"]["error"]["message"]) == (400, "no")


async def test_a_batch_whose_lines_all_fail_is_complete_without_an_output(tmp_path: Path) -> None:
    backend = ScriptedBackend(answers=lambda _: failure(400))
    async with (scene := await opened(tmp_path, backend)).service:
        done = await scene.ends((await scene.create(lines(3))).id)
        assert done.status == "completed"
        assert done.request_counts.model_dump() == {"total": 3, "completed": 0, "failed": 3}
        assert done.output_file_id is None
        assert done.error_file_id
        assert len(await scene.records(done)) == 3


async def test_engine_failures_are_retried_within_limits(tmp_path: Path) -> None:
    attempts: Counter[str] = Counter()

    def answers(request: LineRequest) -> LineResult:
        attempts[name_of(request)] += 1
        if name_of(request) == "id-1" and attempts["id-1"] < 3:
            return failure(503, is_retryable=True)
        if name_of(request) == "id-2":
            raise RuntimeError("out of memory")
        return answer(request)

    backend = ScriptedBackend(answers=answers)
    async with (scene := await opened(tmp_path, backend, max_attempts=4)).service as service:
        done = await scene.ends((await scene.create(lines(3))).id)
        assert done.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        assert attempts == {"id-1": 3, "id-2": 4, "id-3": 1}
        assert (await service.status()).line_retries == 5
        response = (await scene.records(done))["id-2"]["response"]
        assert response["status_code"] == 500
        assert "out of memory" in response["body"]["error"]["message"]


async def test_each_attempt_has_a_body_of_its_own(tmp_path: Path) -> None:
    """SGLang's models change what they are given."""
    bodies: list[dict[str, Any]] = []

    def answers(request: LineRequest) -> LineResult:
        bodies.append(deepcopy(request.body))
        if len(bodies) < 3:
            request.body["response_format"]["schema"].clear()
            request.body["max_tokens"] = -1
            return failure(503, is_retryable=True)
        return answer(request)

    async with (scene := await opened(tmp_path, ScriptedBackend(answers=answers))).service:
        content = lines(1, response_format={"schema": {"type": "object"}})
        done = await scene.ends((await scene.create(content)).id)
        assert done.request_counts.completed == 1
        assert bodies[0]["response_format"] == {"schema": {"type": "object"}}
        assert bodies == [bodies[0]] * 3


async def test_a_retry_continues_from_what_was_generated(tmp_path: Path) -> None:
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


async def test_an_answer_is_never_of_two_models(tmp_path: Path) -> None:
    """Weights that change under a line start it over, whether it then fails or not."""
    scene = await opened(tmp_path, ScriptedBackend(holds=True))
    async with scene.service as service:
        batch = await scene.create(lines(1, max_tokens=30))
        again = failure(503, is_retryable=True)
        for started, continued, next_model, result in (
            (1, 0, "scripted", again),
            (2, 5, "new weights", None),
            (3, 0, "newer weights", again),
            (4, 0, "scripted", None),
            (5, 10, "scripted", None),
        ):
            await scene.clock.until(lambda n=started: len(scene.backend.started) == n)  # type: ignore[misc]
            assert len(scene.backend.started[-1].generated) == continued
            entry = scene.backend.held("id-1")
            entry.generate(5)
            scene.backend.model = next_model
            entry.generate(5 if next_model != "scripted" else 0)
            entry.finish(result)
        done = await scene.ends(batch.id)
        assert done.request_counts.completed == 1
        assert done.coserve.warning is None
        # A change of the model is no failure of the engine.
        assert (await service.status()).line_retries == 1


@pytest.mark.parametrize("how", ["taken out", "aborted"])
async def test_lines_give_way_to_other_weights_as_often_as_they_come(
    tmp_path: Path, how: str
) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True), max_attempts=2)
    async with scene.service as service:
        batch = await scene.create(lines(3))
        for number in range(7):
            await scene.in_flight(3)
            held = list(scene.backend.in_flight)
            scene.backend.is_changing = True
            if how == "taken out":
                scene.backend.take_out()
            else:
                for entry in held:
                    entry.finish(failure(503, is_retryable=True))
            await scene.in_flight(0)
            await asyncio.sleep(0.01)
            assert scene.backend.in_flight == []
            scene.backend.model = f"weights {number}"
            scene.backend.is_changing = False
        await scene.in_flight(3)
        scene.backend.finish_all()
        done = await scene.ends(batch.id)
        assert done.request_counts.completed == 3
        assert (await service.status()).line_retries == 0


async def test_who_listens_no_more_is_not_kept(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    for _ in range(3):
        scene = await opened(tmp_path, backend)
        async with scene.service:
            assert len(backend.listeners._listeners) == 1
    assert len(backend.listeners._listeners) == 0
