"""The Batch API without HTTP: what the routes call."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import AsyncIterable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final, Self

from sglang_coserve.batch.admission import new_batch
from sglang_coserve.batch.context import EventDelivery, JobContext, open_engine_lines
from sglang_coserve.batch.data_directory import OTHER_DIRECTORY, DataDirectory
from sglang_coserve.batch.eta import Headroom
from sglang_coserve.batch.file_store import FileStore, Transfers
from sglang_coserve.batch.job_supervisor import JobSupervisor
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.record import JobRecord, ServiceStatus, Status
from sglang_coserve.batch.schemas import (
    BatchList,
    BatchObject,
    CreateBatch,
    ExpiresAfter,
    FileDeleted,
    FileList,
    FileObject,
    ignored_fields,
)
from sglang_coserve.batch.state import Asked, BatchAction
from sglang_coserve.batch.store import MOST_ROWS, Store, batch_rows, file_rows
from sglang_coserve.errors import StartupError, StorageError
from sglang_coserve.lines.backend import Backend
from sglang_coserve.lines.background import Clock, TaskSupervisor, WorkerThreads
from sglang_coserve.lines.engine_lines import EngineLines
from sglang_coserve.lines.fair_slots import FairSlots, JobShare
from sglang_coserve.lines.serve_line import EngineHealth, RetryPolicy

_FILE_THREADS: Final = 4
_READERS: Final = 2
"""Processes that read input files, so that a small one does not wait for a large one."""

_EXPIRY_INTERVAL_S: Final = 60.0

_log = logging.getLogger(__name__)


class BatchService:
    """Files and batches of many owners, on one directory and one engine.

    Where an owner may be None, that is the operator, to whom everybody's batches are open.
    Methods raise ``NotFoundError`` for what an owner does not have, other
    ``ApiError`` for what cannot be asked, and ``StorageError`` when the disk
    fails. Whatever they have returned survives a crash.
    """

    def __init__(self, context: JobContext) -> None:
        """Made by ``open``."""
        self.context = context
        self._opened = AsyncExitStack()
        self.files = FileStore(context)
        self.runner = JobSupervisor(context)
        self.uploads = Transfers("uploads", context.limits.max_transfers)
        self.downloads = Transfers("downloads", context.limits.max_transfers)
        self._list_turns = FairSlots(1, max_bytes=1)
        """Turns at lists: one page is read at a time, and owners alternate."""

    @staticmethod
    async def check(directory: Path) -> None:
        """Check whether ``open`` can use ``directory``; create it if it does not exist.

        Raises:
            StartupError: it could not.
        """
        data = DataDirectory(directory)
        data.open()
        try:
            await (await Store.open(data.database)).close()
        finally:
            data.close()

    @classmethod
    async def open(
        cls,
        directory: Path,
        backend: Backend,
        limits: BatchLimits | None = None,
        *,
        event_delivery: EventDelivery | None = None,
        dies_with_engine: bool = True,
        background: TaskSupervisor | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        retry_policy: RetryPolicy | None = None,
        hint: str = OTHER_DIRECTORY,
        must_be_private: bool = True,
    ) -> Self:
        """Open or create ``directory``, and continue its unfinished batches.

        ``event_delivery`` delivers the ends of batches, which are kept only if there is one.
        Without ``dies_with_engine`` this process outlives the engine's end, so that nothing is
        recorded to learn from it at the next start. ``background`` runs the service's tasks; by
        default the service has a supervisor of its own. ``rng`` makes the ids, so it must be one
        that cannot be guessed. ``retry_policy`` is by default that of ``limits``; it must give up
        no engine. ``hint`` and ``must_be_private`` are for ``DataDirectory``.

        Raises:
            StartupError: the directory cannot be used, or another server is using it.
        """
        limits, clock = limits or BatchLimits(), clock or Clock()
        async with AsyncExitStack() as opened:
            try:
                data = DataDirectory(directory, hint=hint, must_be_private=must_be_private)
                data.open()
                opened.callback(data.close)
                store = await Store.open(data.database, data.make_room, hint)
                opened.push_async_callback(store.close)
                threads = WorkerThreads("coserve-files", _FILE_THREADS)
                opened.push_async_callback(threads.close)
                engine_lines = EngineLines()
                if dies_with_engine:
                    engine_lines = await open_engine_lines(data, store, threads)
                opened.callback(engine_lines.close)
                opened.callback(backend.when_changing(engine_lines.take_out))
                context = JobContext(
                    directory=data,
                    store=store,
                    threads=threads,
                    slots=FairSlots(limits.max_in_flight, limits.max_in_flight_bytes),
                    engine_lines=engine_lines,
                    backend=backend,
                    limits=limits,
                    reading_turns=FairSlots(_READERS, max_bytes=1),
                    background=background or TaskSupervisor(clock),
                    record_events=event_delivery is not None,
                    clock=clock,
                    rng=rng or random.SystemRandom(),
                    retry_policy=retry_policy
                    or RetryPolicy(math.inf, limits.max_attempts, max_delay_s=30.0),
                    health=EngineHealth(),
                    flush_interval_s=limits.flush_interval_s,
                    journal_interval_s=limits.journal_interval_s,
                )
                service = cls(context)
                opened.push_async_callback(service.runner.close)
                await service.files.settle()
                await service.runner.start()
            except StorageError as error:
                raise StartupError(str(error)) from error
            expiring = context.background.running("file_expiry", service._expire_regularly)
            await opened.enter_async_context(expiring)
            if event_delivery is not None:
                await opened.enter_async_context(event_delivery(context))
            service._opened = opened.pop_all()
        return service

    async def close(self) -> None:
        """Stop every batch where it is, and release the directory."""
        await self._opened.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def create_file(
        self,
        owner: str,
        filename: str,
        chunks: AsyncIterable[bytes],
        expires_after: Callable[[], ExpiresAfter | None] = lambda: None,
    ) -> FileObject:
        """Store an upload. What it holds is looked at when a batch is made of it.

        ``expires_after`` is asked after the last chunk: a form may say it there.

        Raises:
            TooLargeError: it is longer than ``max_upload_bytes``.
            QuotaError: the owner has too much on the disk.
        """
        file = await self.files.add_input(owner, filename, chunks, expires_after)
        return FileObject.of(file)

    async def list_files(
        self,
        owner: str,
        *,
        after: str | None = None,
        limit: int = 10_000,
        order: str = "desc",
        purpose: str | None = None,
    ) -> FileList:
        """Return a page of files by their creation, ``MOST_ROWS`` of them at the most."""
        limit = min(limit, MOST_ROWS)
        async with self._list_turns.one(JobShare(owner, 0, 0.0), limit):
            found = await self.context.store.lists.run(
                file_rows.page,
                owner,
                self.context.clock.now_s(),
                after=after,
                limit=limit + 1,
                is_ascending=order == "asc",
                purpose=purpose,
            )
            # In a thread: there may be a thousand.
            return await self.context.threads.run(FileList.of, found, limit, FileObject.of)

    async def retrieve_file(self, owner: str, file_id: str) -> FileObject:
        """Return one file."""
        now_s = self.context.clock.now_s()
        return FileObject.of(await self.context.store.run(file_rows.find, owner, file_id, now_s))

    async def delete_file(self, owner: str, file_id: str) -> FileDeleted:
        """Delete a file.

        Raises:
            ConflictError: an unfinished batch reads or writes it.
        """
        await self.files.remove(owner, file_id)
        return FileDeleted(id=file_id)

    async def create_batch(
        self, owner: str, request: CreateBatch, idempotency_key: str | None = None
    ) -> BatchObject:
        """Begin a batch. The same key and request again return the same batch. The answer's
        warning names fields that are ignored.

        Raises:
            ApiError: the endpoint or the window cannot be used.
            ConflictError: the key was used for another request.
            TooManyError: too many batches are unfinished.
            QuotaError: the owner has too much on the disk.
        """
        wanted = new_batch(owner, request, idempotency_key, self.context)
        shown = self._shown(await self.runner.create(wanted))
        if warning := ignored_fields(request.ignored):
            _log.warning("batch %s: %r", shown.id, warning)
            shown.coserve.warning = "; ".join(filter(None, (warning, shown.coserve.warning)))
        return shown

    async def retrieve_batch(self, owner: str | None, batch_id: str) -> BatchObject:
        """Return one batch."""
        return self._shown(await self.context.store.run(batch_rows.find, batch_id, owner))

    async def list_batches(
        self,
        owner: str | None,
        *,
        after: str | None = None,
        limit: int = 20,
        status: str | None = None,
    ) -> BatchList:
        """Return a page of batches, the newest first, ``MOST_ROWS`` of them at the most."""
        limit = min(limit, MOST_ROWS)
        async with self._list_turns.one(JobShare(owner or "", 0, 0.0), limit):
            found = await self.context.store.lists.run(
                batch_rows.page, owner, after=after, limit=limit + 1, status=status
            )
            render = self._renderer(found)
            # A failed batch has up to a hundred errors, and is not small either.
            return await self.context.threads.run(BatchList.of, found, limit, render)

    def unfinished_batches(self, owner: str | None, limit: int) -> list[BatchObject]:
        """Return batches that have not ended, and no responses, the newest first."""
        found = [
            batch
            for batch in self.runner.unfinished()
            if batch.response is None and owner in (None, batch.owner)
        ]
        newest = found[-limit:][::-1]
        return [*map(self._renderer(newest), newest)]

    async def change_batch(
        self, owner: str | None, batch_id: str, action: BatchAction
    ) -> BatchObject:
        """Cancel a batch, whose finished lines keep their results; take it out of the engine until
        it is resumed, while its window goes on; or let it go on.

        Raises:
            ConflictError: its state forbids it.
        """
        return self._shown(await self.runner.change(batch_id, Asked(action), owner))

    async def move_owner(self, owner: str, to: str) -> tuple[int, int]:
        """Give all that ``owner`` has to another owner; return how many files and batches.

        An upload that is under way stays the first owner's. Batches that run keep their place among
        those of the first owner until the next start.
        """
        return await self.context.store.run(batch_rows.move_owner, owner, to)

    async def status(self) -> ServiceStatus:
        """Return how busy the service is."""
        webhooks_pending = await self.context.store.run(batch_rows.count_events)
        context, slots, records = self.context, self.context.slots, self.runner.unfinished()
        lines_left = sum(
            record.total_lines - record.progress.lines
            for record in records
            if record.status is Status.IN_PROGRESS
        )
        suspects = context.engine_lines.turns.suspects_in_flight
        return ServiceStatus(
            batches=dict(Counter(record.status.value for record in records)),
            paused_batches=sum(record.is_paused for record in records),
            lines_in_flight=slots.lines_in_flight + suspects,
            bytes_in_flight=slots.bytes_in_flight,
            lines_waiting=max(0, lines_left - slots.lines_in_flight),
            line_retries=context.health.num_retries,
            webhooks_pending=webhooks_pending,
            model=context.backend.model,
        )

    def headroom(self) -> Headroom:
        """Return how much more offline work would finish in time. Cheap."""
        return self.runner.headroom()

    def _shown(self, batch: JobRecord) -> BatchObject:
        return self._renderer([batch])(batch)

    def _renderer(self, batches: list[JobRecord]) -> Callable[[JobRecord], BatchObject]:
        """Return what makes objects of ``batches``, in any thread."""
        model = self.context.backend.model or None  # A gateway may not know it yet.
        shown: dict[str, Callable[[], BatchObject]] = {}
        for batch in batches:
            driver = self.runner.driver(batch.id)
            shown[batch.id] = partial(
                BatchObject.of,
                *(batch, self.runner.eta(batch), model),
                stalled_by=driver.stalled_by if driver else None,
                waiting_for=driver.waiting_for(batch) if driver else None,
                lines_in_flight=driver.share.lines_in_engine if driver else 0,
            )
        return lambda batch: shown[batch.id]()

    async def _expire_regularly(self) -> None:
        while True:
            limits = self.context.limits
            await self.context.delete_old(limits.response_retention_s, are_responses=True)
            await self.context.delete_old(limits.batch_retention_s, are_responses=False)
            await self.files.remove_expired(self.context.clock.now_s())
            await self.context.clock.sleep(_EXPIRY_INTERVAL_S)
