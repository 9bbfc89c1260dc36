"""What the tests of the service have in common: input files, a service, its results."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from batch.manual_clock import ManualClock
from batch.scripted_backend import ENDPOINT, ScriptedBackend
from sglang_coserve.batch.context import EventDelivery, JobContext
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.schemas import (
    BatchObject,
    CoserveOptions,
    CreateBatch,
    FileObject,
)
from sglang_coserve.batch.service import BatchService

T = TypeVar("T")
OWNER = "owner"
SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef").decode()
FINAL = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, **body: Any) -> str:
    """A valid line."""
    fields = {"prompt": custom_id} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": fields})


def lines(count: int, prefix: str = "id", **body: Any) -> bytes:
    """A valid file."""
    return "".join(line(f"{prefix}-{n}", **body) + "\n" for n in range(1, count + 1)).encode()


@asynccontextmanager
async def undelivered(context: JobContext) -> AsyncGenerator[None]:
    """Leaves the ends of batches in the outbox."""
    yield


async def stream(content: bytes, chunk_bytes: int = 1 << 16) -> AsyncIterator[bytes]:
    for start in range(0, len(content), chunk_bytes):
        yield content[start : start + chunk_bytes]


def wanted(input_file: FileObject | str, window: str = "24h", **options: Any) -> CreateBatch:
    """A request for a batch; ``options`` are priority and weight."""
    return CreateBatch(
        input_file_id=input_file if isinstance(input_file, str) else input_file.id,
        endpoint=ENDPOINT,
        completion_window=window,
        coserve=CoserveOptions(**options),
    )


@dataclass
class Scene:
    """A service, its engine and its time."""

    service: BatchService
    backend: ScriptedBackend
    clock: ManualClock
    directory: Path

    async def upload(self, content: bytes, owner: str = OWNER) -> FileObject:
        return await self.service.create_file(owner, "in.jsonl", stream(content))

    async def create(
        self, content: bytes, window: str = "24h", owner: str = OWNER, **options: Any
    ) -> BatchObject:
        file = await self.upload(content, owner)
        return await self.service.create_batch(owner, wanted(file, window, **options))

    async def reaches(self, batch_id: str, *statuses: str, owner: str = OWNER) -> BatchObject:
        """Wait until the batch is in one of ``statuses``."""

        def is_there(batch: BatchObject) -> bool:
            assert batch.status in statuses or batch.status not in FINAL, batch
            return batch.status in statuses

        return await self.once(batch_id, is_there, owner)

    async def once(
        self, batch_id: str, is_true: Callable[[BatchObject], object], owner: str = OWNER
    ) -> BatchObject:
        """Wait until something is true of the batch, as its owner sees it."""

        async def look() -> BatchObject | None:
            batch = await self.service.retrieve_batch(owner, batch_id)
            return batch if is_true(batch) else None

        return await self.eventually(look)

    async def warning(self, batch_id: str) -> str:
        """Wait until the batch has a warning."""
        batch = await self.once(batch_id, lambda batch: batch.coserve.warning)
        return batch.coserve.warning or ""

    async def ends(self, batch_id: str) -> BatchObject:
        """Wait until the batch is in a final state."""
        return await self.reaches(batch_id, *FINAL)

    async def eventually(self, look: Callable[[], Awaitable[T | None]]) -> T:
        """Let time pass until ``look`` finds something."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + 60.0
        while (found := await look()) is None:
            assert loop.time() < give_up_s, "still waiting"
            await asyncio.sleep(0.001)
            self.clock.advance(0.05)
        return found

    async def in_flight(self, count: int) -> None:
        """Wait until the engine has ``count`` requests."""
        await self.clock.until(lambda: len(self.backend.in_flight) == count, f"{count} in flight")

    async def content(self, file_id: str | None) -> bytes:
        """A file's bytes; none when there is no file."""
        if file_id is None:
            return b""
        end = (await self.service.retrieve_file(OWNER, file_id)).bytes
        return b"".join([chunk async for chunk in self.service.files.read(file_id, 0, end)])

    async def records(self, batch: BatchObject) -> dict[str, dict[str, Any]]:
        """Every record of a batch by its custom id; fails when a line has two."""
        found: dict[str, dict[str, Any]] = {}
        for file_id in (batch.output_file_id, batch.error_file_id):
            for text in (await self.content(file_id)).splitlines():
                record = json.loads(text)
                assert record["custom_id"] not in found, f"two records: {record['custom_id']}"
                found[record["custom_id"]] = record
        return found


async def opened(
    directory: Path,
    backend: ScriptedBackend | None = None,
    clock: ManualClock | None = None,
    *,
    event_delivery: EventDelivery | None = None,
    rng: random.Random | None = None,
    **limits: Any,
) -> Scene:
    """A service on ``directory``, to be closed by the test."""
    backend, clock = backend or ScriptedBackend(), clock or ManualClock()
    service = await BatchService.open(
        directory,
        backend,
        BatchLimits(**limits),
        event_delivery=event_delivery,
        clock=clock,
        rng=rng or random.Random(),
    )
    return Scene(service, backend, clock, directory)
