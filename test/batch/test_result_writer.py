"""Group commit: on the disk first, then counted, together, and never twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from batch.manual_clock import ManualClock
from batch.test_result_log import record, unserved
from sglang_coserve.errors import StorageError
from sglang_coserve.lines.background import WorkerThreads
from sglang_coserve.lines.result_log import ResultLog, ResultWriter
from sglang_coserve.lines.result_record import Progress, Usage
from waiting import until


@dataclass
class Desk:
    """A writer, and what it has committed."""

    directory: Path
    output: Path
    clock: ManualClock = field(default_factory=ManualClock)
    commits: list[Progress] = field(default_factory=list)
    is_broken: bool = False
    held: asyncio.Event | None = None
    """A commit waits for it."""

    waits: bool = False

    async def commit(self, progress: Progress) -> None:
        if self.held is not None:
            self.waits = True
            await self.held.wait()
        if self.is_broken:
            raise StorageError("no")
        on_disk = self.output.stat().st_size if self.output.exists() else 0
        assert on_disk >= progress.output_bytes, "counted before it was written"
        self.commits.append(progress)

    def add(self, writer: ResultWriter, line: int, *, is_ok: bool = True) -> None:
        content = record(line, tokens=2) if is_ok else unserved(line)
        usage = Usage(2, 0, 1, 0) if is_ok else Usage()
        writer.add(content, is_ok=is_ok, usage=usage, estimated_tokens=4)

    @asynccontextmanager
    async def writer(self) -> AsyncGenerator[ResultWriter]:
        threads = WorkerThreads("test", 1)
        log = ResultLog(self.output, self.directory / "errors")
        try:
            yield ResultWriter(log, self.commit, threads, self.clock, 1.0)
        finally:
            await threads.close()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, tmp_path / "output")


async def test_results_of_one_interval_are_committed_together(desk: Desk) -> None:
    async with desk.writer() as writer:
        desk.add(writer, 1)
        await asyncio.sleep(0.01)
        desk.add(writer, 2)
        desk.add(writer, 3, is_ok=False)
        await asyncio.sleep(0.01)
        assert desk.commits == []
        await desk.clock.until(lambda: bool(desk.commits))
        assert [(p.completed, p.failed) for p in desk.commits] == [(2, 1)]
        desk.add(writer, 4)
        await desk.clock.until(lambda: len(desk.commits) == 2)
        await writer.close()
        size_bytes = len(record(1, 2) * 3)
        done = Progress(3, 1, size_bytes, len(unserved(3)), Usage(6, 0, 3, 0), 16)
        assert desk.commits[-1] == done
        assert desk.output.read_bytes() == record(1, 2) + record(2, 2) + record(4, 2)


async def test_closing_goes_on_when_it_is_cancelled_again(desk: Desk) -> None:
    """A batch is changed, which ends its run, and then the server stops, which ends it again."""
    async with desk.writer() as writer:
        desk.add(writer, 1)
        desk.held = asyncio.Event()
        await desk.clock.until(lambda: desk.waits)
        desk.add(writer, 2)
        closing = asyncio.create_task(writer.close())
        for _ in range(3):
            await asyncio.sleep(0.01)
            closing.cancel()
        await asyncio.sleep(0.01)
        assert not closing.done()
        desk.held.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(closing, 30)
        assert [p.completed for p in desk.commits] == [1, 2]
        assert desk.output.read_bytes() == record(1, 2) + record(2, 2)


async def test_a_full_buffer_waits_for_the_disk_and_not_for_the_clock(desk: Desk) -> None:
    async with desk.writer() as writer:
        for line in range(1, 3):
            padding = b" " * (3 << 20)
            content = record(line).replace(b"null}", b"null" + padding + b"}")
            writer.add(content, is_ok=True, usage=Usage(), estimated_tokens=0)
        await writer.room()
        await until(lambda: desk.commits)
        assert desk.commits[-1].completed == 2
        await writer.close()


async def test_a_failing_disk_is_told_to_everybody(tmp_path: Path) -> None:
    desk = Desk(tmp_path, Path("/dev/full"))
    async with desk.writer() as writer:
        telling = asyncio.create_task(writer.failure())
        desk.add(writer, 1)
        await desk.clock.until(telling.done)
        for call in (telling, writer.room(), writer.close()):
            with pytest.raises(StorageError, match="No space left"):
                await call
        assert desk.commits == []


async def test_what_could_not_be_counted_is_told(desk: Desk) -> None:
    async with desk.writer() as writer:
        desk.is_broken = True
        desk.add(writer, 1)
        with pytest.raises(StorageError, match="no"):
            await writer.close()
