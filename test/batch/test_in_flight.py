"""The table of the lines in the engine is written beside the event loop, and in order."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_coserve.errors import StorageError
from sglang_coserve.lines.engine_lines import EngineLines, InFlightFile
from sglang_coserve.lines.fair_slots import JobShare

BATCHES = [f"batch_{number:024x}" for number in range(3)]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[InFlightFile]:
    made = InFlightFile(tmp_path / "in_flight", tmp_path / "fatal_signal")
    made.start()
    yield made
    made.close()


@pytest.fixture
def stalled(table: InFlightFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A disk for which every write waits until this is called."""
    write, goes_on = os.pwrite, threading.Event()

    def waiting(fd: int, content: bytes, offset: int) -> int:
        assert goes_on.wait(20), "the write is waited for on the event loop"
        return write(fd, content, offset)

    monkeypatch.setattr(os, "pwrite", waiting)
    yield goes_on.set
    goes_on.set()


def left(table: InFlightFile) -> set[tuple[str, int]]:
    found = table.last_run()
    assert found is not None
    return set(found.lines)


async def test_the_loop_runs_while_the_disk_stands_still_and_no_line_begins(
    table: InFlightFile, stalled: Callable[[], None]
) -> None:
    begun: list[int] = []
    share = JobShare("owner", 0, 0.0)

    async def serve(line: int) -> None:
        async with EngineLines(table).in_engine(BATCHES[0], line, share):
            assert (BATCHES[0], line) in left(table)
            begun.append(line)

    running = asyncio.gather(*map(serve, range(1, 5)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert begun == []
    stalled()
    await running
    assert sorted(begun) == [1, 2, 3, 4]
    table.close()
    assert left(table) == set()


async def test_a_line_that_is_cancelled_while_it_is_recorded_leaves_nothing(
    table: InFlightFile, stalled: Callable[[], None]
) -> None:
    beginning = [asyncio.create_task(table.begin(batch, 7)) for batch in BATCHES]
    await asyncio.sleep(0)
    for each in beginning[:2]:
        each.cancel()
    await asyncio.sleep(0)
    stalled()
    await asyncio.wait(beginning)
    entry = await table.begin(BATCHES[0], 9)
    assert left(table) == {(BATCHES[2], 7), (BATCHES[0], 9)}
    table.end(entry)
    table.close()
    assert left(table) == {(BATCHES[2], 7)}


async def test_a_line_that_the_disk_does_not_take_does_not_begin(
    table: InFlightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> int:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match="no room"):
            await table.begin(BATCHES[0], 1)
        # The entry is written anew once it is free.
        table._writer.submit(int).result()
    assert await table.begin(BATCHES[1], 2) == 0
    table.note_death()
    found = table.last_run()
    assert found is not None and found.engine_died
    assert found.lines == ((BATCHES[1], 2),)
