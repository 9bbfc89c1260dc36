"""An engine that dies of a line: who is suspected, who is given up, who is served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from batch.scenarios import OWNER, Scene, lines, opened
from batch.scripted_backend import ScriptedBackend, name_of, tokens_of
from sglang_coserve.batch.data_directory import DataDirectory
from sglang_coserve.batch.schemas import BatchObject


def is_poison(custom_id: str) -> bool:
    return custom_id.startswith("poison")


class MortalEngine(ScriptedBackend):
    """Serves what it has together, until it gets a line that it dies of."""

    async def until_death_or_end(self, scene: Scene, batch_ids: list[str]) -> bool:
        """Return whether it has died; it remembers who was with whom when."""
        while True:
            for _ in range(20):
                await asyncio.sleep(0.001)
                scene.clock.advance(0.05)
            if any(is_poison(name_of(entry.request)) for entry in self.in_flight):
                return True
            self.finish_all()
            ends = [await scene.service.retrieve_batch(OWNER, each) for each in batch_ids]
            if all(each.status == "completed" for each in ends):
                return False


def content(innocents: int, *poisons: str) -> bytes:
    """Poison lines stand between the others."""
    good = lines(innocents).splitlines(keepends=True)
    half = innocents // 2
    bad = [lines(1, name).replace(b"-1", b"") for name in poisons]
    return b"".join([*good[:half], *bad, *good[half:]])


async def ends_like_a_killed_one(scene: Scene) -> None:
    """The service's tasks end, its files stay as they are at this moment."""
    file = scene.service.context.engine_lines._file
    left = scene.directory / "in_flight"
    before = left.read_bytes()
    file.close()
    await scene.service.close()
    left.write_bytes(before)


async def lives(
    directory: Path, contents: list[bytes], die: Callable[[Scene], None], max_starts: int = 30
) -> tuple[list[BatchObject], list[dict[str, object]], int]:
    """Run the batches as a supervisor would; return them, their records, and how often it died."""
    ids: list[str] = []
    for deaths in range(max_starts):
        engine = MortalEngine(holds=True)
        scene = await opened(directory, engine, max_in_flight=8)
        ids += [(await scene.create(each)).id for each in contents[len(ids) :]]
        if await engine.until_death_or_end(scene, ids):
            die(scene)
            await ends_like_a_killed_one(scene)
            continue
        batches = [await scene.service.retrieve_batch(OWNER, each) for each in ids]
        records = [await scene.records(each) for each in batches]
        await scene.service.close()
        return batches, list(records), deaths
    raise AssertionError(f"still dying after {max_starts} starts")


def noted(scene: Scene) -> None:
    scene.service.context.engine_lines.note_death()


def traced(scene: Scene) -> None:
    scene.service.context.directory.fatal_signal.write_text(
        "Fatal Python error: Segmentation fault\n"
    )


@pytest.mark.parametrize("die", [noted, traced])
async def test_a_line_the_engine_dies_of_twice_is_given_up_and_no_other(
    tmp_path: Path, die: Callable[[Scene], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    contents = [content(30, "poison"), lines(12, "other")]
    batches, records, deaths = await lives(tmp_path, contents, die)
    assert deaths == 2
    assert [batch.request_counts.completed for batch in batches] == [30, 12]
    assert [batch.request_counts.failed for batch in batches] == [1, 0]
    poison = records[0].pop("poison")
    assert isinstance(poison, dict)
    assert poison["response"] is None
    assert poison["error"]["code"] == "engine_failed"
    assert "2 times" in poison["error"]["message"]
    for custom_id, record in (records[0] | records[1]).items():
        assert isinstance(record, dict)
        text = record["response"]["body"]["choices"][0]["text"]
        assert text == " ".join(map(str, tokens_of(custom_id, 4)))
    assert "the engine ended by itself with" in caplog.text
    assert ("Segmentation fault" in caplog.text) == (die is traced)


async def test_several_such_lines_cost_no_innocent_one(tmp_path: Path) -> None:
    poisons = [f"poison{n}" for n in range(4)]
    contents = [content(30, *poisons[:3]), content(9, poisons[3])]
    batches, records, deaths = await lives(tmp_path, contents, noted)
    assert [batch.request_counts.completed for batch in batches] == [30, 9]
    for each in records:
        for custom_id, record in each.items():
            assert isinstance(record, dict)
            assert (record["error"] is not None) == is_poison(custom_id)
    # Once all of those that were in the engine together, then each of them alone.
    assert deaths <= 2 * len(poisons)


async def test_a_server_that_is_killed_suspects_nobody(tmp_path: Path) -> None:
    """Five times with the same lines in the engine, as an impatient supervisor does."""
    batch_id = ""
    for _ in range(5):
        scene = await opened(tmp_path, ScriptedBackend(holds=True))
        batch_id = batch_id or (await scene.create(lines(6))).id
        await scene.in_flight(6)
        await ends_like_a_killed_one(scene)
    async with (scene := await opened(tmp_path)).service:
        done = await scene.ends(batch_id)
        assert done.request_counts.completed == 6


async def died_of_three_lines(directory: Path) -> BatchObject:
    scene = await opened(directory, ScriptedBackend(holds=True))
    batch = await scene.create(lines(3))
    await scene.in_flight(3)
    noted(scene)
    await ends_like_a_killed_one(scene)
    return batch


async def test_a_death_is_counted_once_however_often_the_start_after_it_fails(
    tmp_path: Path,
) -> None:
    batch = await died_of_three_lines(tmp_path)
    left = (tmp_path / "in_flight").read_bytes()
    for _ in range(3):
        # It dies between counting and beginning a run of its own.
        scene = await opened(tmp_path, ScriptedBackend(holds=True))
        await scene.in_flight(1)
        await scene.service.close()
        (tmp_path / "in_flight").write_bytes(left)
    async with (scene := await opened(tmp_path)).service:
        assert (await scene.ends(batch.id)).request_counts.completed == 3


async def test_a_suspect_that_is_served_is_one_no_more(tmp_path: Path) -> None:
    batch = await died_of_three_lines(tmp_path)
    backend = ScriptedBackend(holds=True)
    scene = await opened(tmp_path, backend)
    for _ in range(3):
        await scene.in_flight(1)
        assert (await scene.service.status()).lines_in_flight == 1
        backend.in_flight[0].finish()
        await asyncio.sleep(0.01)
    assert (await scene.ends(batch.id)).request_counts.completed == 3
    await scene.service.close()
    async with (scene := await opened(tmp_path)).service as service:
        rows = await service.context.store.run(
            lambda db: db.execute("SELECT count(*) FROM suspects").fetchone()[0]
        )
        assert rows == 0


async def test_nothing_reaches_the_engine_that_cannot_be_noted(tmp_path: Path) -> None:
    scene = await opened(tmp_path)
    async with scene.service as service:
        file = service.context.engine_lines._file
        fd, file._fd = file._fd, -1
        batch = await scene.create(lines(2))

        assert "in_flight" in await scene.warning(batch.id)
        assert scene.backend.started == []
        file._fd = fd
        assert (await scene.ends(batch.id)).request_counts.completed == 2


async def test_what_a_machine_leaves_that_died_is_no_obstacle(tmp_path: Path) -> None:
    for left in (b"", b"coserve", b"\0" * 500, b"coserve flight 1" + b"x" * 30):
        (tmp_path / "in_flight").write_bytes(left)
        (tmp_path / "fatal_signal").write_bytes(b"\xff")
        async with (scene := await opened(tmp_path)).service:
            await scene.ends((await scene.create(lines(1))).id)
    assert DataDirectory(tmp_path).in_flight.exists()
