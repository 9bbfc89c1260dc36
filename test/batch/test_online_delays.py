"""By how much a batch has delayed online requests: kept with it, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

from batch.scenarios import OWNER, Scene, lines, opened
from batch.scripted_backend import ScriptedBackend
from sglang_coserve.batch.job_supervisor import COUNT_INTERVAL_S


async def delay_s(scene: Scene, batch_id: str, expected: float | None) -> float | None:
    """What the batch says after the next count, or the one after it."""
    shown = None
    for _ in range(100):
        scene.clock.advance(COUNT_INTERVAL_S / 2)
        await asyncio.sleep(0.002)
        shown = (await scene.service.retrieve_batch(OWNER, batch_id)).coserve.online_delay_s
        if shown == expected:
            break
    return shown


async def test_a_batch_says_what_was_billed_also_after_its_end_and_a_restart(
    tmp_path: Path,
) -> None:
    found: list[str] = []
    backend = ScriptedBackend(holds=True)
    async with (scene := await opened(tmp_path, backend)).service:
        batch = await scene.create(lines(2))
        found.append(batch.id)
        await scene.in_flight(2)
        assert await delay_s(scene, batch.id, None) is None
        backend.delays_s = {}
        assert await delay_s(scene, batch.id, 0.0) == 0.0
        backend.delays_s = {batch.id: 1.5, "batch_of_before": 9.0}
        assert await delay_s(scene, batch.id, 1.5) == 1.5
        backend.finish_all()
        await scene.ends(batch.id)
        backend.delays_s = {batch.id: 2.0}
        assert await delay_s(scene, batch.id, 2.0) == 2.0
    backend = ScriptedBackend(delays_s={})
    async with (scene := await opened(tmp_path, backend)).service:
        assert await delay_s(scene, found[0], 2.0) == 2.0
        backend.delays_s = {found[0]: 0.25}
        assert await delay_s(scene, found[0], 2.25) == 2.25


async def test_a_batch_that_ends_between_two_counts_has_delayed_nobody(tmp_path: Path) -> None:
    backend = ScriptedBackend(delays_s={})
    async with (scene := await opened(tmp_path, backend)).service:
        batch = await scene.create(lines(1))
        await scene.ends(batch.id)
        assert await delay_s(scene, batch.id, 0.0) == 0.0


async def test_what_the_engine_has_forgotten_begins_again_at_nothing(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True)
    async with (scene := await opened(tmp_path, backend)).service:
        batch = await scene.create(lines(1))
        await scene.in_flight(1)
        backend.delays_s = {batch.id: 1.0}
        assert await delay_s(scene, batch.id, 1.0) == 1.0
        backend.delays_s = {}
        for _ in range(3):
            scene.clock.advance(COUNT_INTERVAL_S)
            await asyncio.sleep(0.01)
        backend.delays_s = {batch.id: 0.5}
        assert await delay_s(scene, batch.id, 1.5) == 1.5


async def test_what_the_baseline_errs_by_is_shown_as_no_delay(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True)
    async with (scene := await opened(tmp_path, backend)).service:
        batch = await scene.create(lines(1))
        backend.delays_s = {batch.id: -0.01}
        assert await delay_s(scene, batch.id, 0.0) == 0.0
