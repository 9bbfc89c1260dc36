"""What a restart of the service continues, and what it tells again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from batch.scenarios import lines, opened
from batch.scripted_backend import ScriptedBackend, failure


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
