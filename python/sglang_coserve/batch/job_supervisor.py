"""Runs a driver for each unfinished batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable
from dataclasses import replace
from typing import Any, Final

from sglang_coserve.batch.context import JobContext
from sglang_coserve.batch.eta import Eta, Forecasts, Headroom, headroom
from sglang_coserve.batch.job_driver import JobDriver
from sglang_coserve.batch.record import JobRecord
from sglang_coserve.batch.state import Event
from sglang_coserve.batch.store import batch_rows, file_rows
from sglang_coserve.jsonl.check_file import estimate_file
from sglang_coserve.lines.background import to_its_end

_LOOK_INTERVAL_S: Final = 1.0
"""How old a forecast may be, and for how long an owner may go on beyond its quota."""

COUNT_INTERVAL_S: Final = 5.0
"""What a crash costs of the sums. Each time is a message to every scheduler and back."""


class JobSupervisor:
    """Starts the drivers, notifies them of changes, and says when their batches will end."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._billed_s: dict[str, float] = {}
        """What was counted of each batch's delays of online requests."""

        self._drivers: dict[str, JobDriver] = {}
        self._forecasts = Forecasts((), None)
        self._headroom = Headroom(None, 0.0, None)
        self._has_changed = False
        """The head-room is to be found again."""

        self._written_bytes: dict[str, int] = {}
        """Results of every owner's unfinished batches when its quota was looked at last."""

        self._uncounted: set[str] = set()
        """Batches that ran since delays were counted last."""

        self._watching: list[asyncio.Task[None]] = []
        self._calls: set[asyncio.Task[JobRecord]] = set()
        self._is_closing = False
        """What is created now is left to the next service."""

    async def start(self) -> None:
        """Continue all unfinished batches.

        Raises:
            StorageError: the database cannot be read.
        """
        self._size_slots()
        records = await self._context.store.run(batch_rows.unfinished)
        await self._hold_owners(records)  # Before any of their lines is sent.
        for record in records:
            self._lead(record)
        await self._forecast()
        # Each by itself: an engine may hang, a disk may fail, and the others go on.
        self._watching = [
            self._context.background.start(name, work)
            for name, work in (
                ("batch_slots", self._watch),
                ("batch_quotas", self._watch_quotas),
                ("online_delays", self._count_delays),
            )
        ]

    async def create(self, wanted: JobRecord) -> JobRecord:
        """Store a batch and lead it to its end; see ``batch_rows.create`` for what it raises.

        It goes on if the caller is cancelled: no batch is in the store that no driver knows of.
        """
        return await self._call(self._create(wanted))

    async def change(self, batch_id: str, event: Event, owner: str | None) -> JobRecord:
        """Take a batch of ``owner``, or of anybody, through an event that comes from outside.

        Raises:
            NotFoundError: the owner has no such batch.
            ConflictError: its state forbids it.
            StorageError: the database cannot be written.
        """
        return await self._call(self._change(batch_id, event, owner))

    def eta(self, latest: JobRecord) -> Eta | None:
        """Return the ETA of a batch that is, or soon will be, served. O(log n).

        ``latest`` is the batch as it is now, which its driver may not have seen yet. Nobody knows
        how long an owner is held.
        """
        if latest.owner in self._context.slots.held:
            return None
        return self._forecasts.eta(latest, self._context.clock.now_s())

    def headroom(self) -> Headroom:
        """Return how much offline work could be added, and still be done in time.

        O(n) once a second, and when a batch has begun or ended since the last call; else O(1).
        """
        if self._has_changed:
            self._has_changed = False
            self._headroom = headroom(*self._prospects(), self._context.clock.now_s())
        return self._headroom

    def driver(self, batch_id: str) -> JobDriver | None:
        """Return who drives a batch; None once it has ended, or the service is closed."""
        return self._drivers.get(batch_id)

    def unfinished(self) -> list[JobRecord]:
        """Return the batches that are in no final state."""
        return [driver.record for driver in self._drivers.values()]

    async def close(self) -> None:
        """Stop every batch where it is; its engine requests are aborted, its results written."""
        await asyncio.gather(*self._calls, return_exceptions=True)  # They may begin another.
        self._is_closing = True
        tasks = [*(driver.task for driver in self._drivers.values()), *self._watching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*self._calls, *tasks, return_exceptions=True)

    async def _call(self, work: Coroutine[Any, Any, JobRecord]) -> JobRecord:
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await to_its_end(task)

    async def _create(self, wanted: JobRecord) -> JobRecord:
        context = self._context
        free_bytes = await context.threads.run(
            context.directory.free_bytes, context.limits.min_free_bytes
        )
        # Before the input is looked at, so that a call that is refused costs next to nothing.
        earlier = await context.store.run(
            batch_rows.find_earlier, wanted, context.limits, free_bytes
        )
        if earlier is not None:
            return earlier
        tokens = await context.threads.run(
            estimate_file,
            context.directory.file(wanted.input_file_id),
            wanted.endpoint,
            context.backend.limits.context_tokens,
        )
        wanted = replace(wanted, estimated_tokens=tokens)
        # Once more: others may have begun meanwhile.
        record, is_new = await context.store.run(
            batch_rows.create, wanted, context.limits, free_bytes
        )
        if is_new and not self._is_closing:
            self._lead(record)
        return record

    async def _change(self, batch_id: str, event: Event, owner: str | None) -> JobRecord:
        record = await self._context.apply(batch_id, event, owner=owner)
        if batch_id in self._drivers:
            self._drivers[batch_id].notice_change()
        return record

    def _lead(self, record: JobRecord) -> None:
        driver = self._drivers[record.id] = JobDriver(record, self._context)
        self._uncounted.add(record.id)
        self._has_changed = True

        def ended(_task: asyncio.Task[None]) -> None:
            del self._drivers[record.id]
            self._has_changed = True

        driver.task.add_done_callback(ended)

    def _size_slots(self) -> None:
        """Have no more lines in flight than the backend has use for: the rest keeps its order."""
        limits, load = self._context.limits, self._context.backend.load()
        most, useful = limits.max_in_flight, load.max_in_flight
        self._context.slots.resize(
            most if useful is None else min(most, useful),
            limits.max_in_flight_bytes * load.num_engines,
        )

    async def _watch(self) -> None:
        while True:
            await self._context.clock.sleep(_LOOK_INTERVAL_S)
            self._size_slots()
            await self._forecast()

    async def _forecast(self) -> None:
        """Foresee the ends of all batches, in a thread: of thousands that takes 10 ms."""
        self._has_changed = True
        self._forecasts = await self._context.threads.run(Forecasts, *self._prospects())

    def _prospects(self) -> tuple[list[JobRecord], float | None]:
        """Return the batches that are, or soon will be, served, and the rate of all of them."""
        held = self._context.slots.held
        served = [
            record
            for record in self.unfinished()
            if record.will_be_served and record.owner not in held
        ]
        rate_per_s = self._context.backend.load().offline_tokens_per_s or None
        return served, rate_per_s

    async def _watch_quotas(self) -> None:
        while True:
            await self._context.clock.sleep(_LOOK_INTERVAL_S)
            await self._hold_owners(self.unfinished())

    async def _hold_owners(self, records: Iterable[JobRecord]) -> None:
        """Hold back the lines of owners who are over their quota; let the others' go on.

        ``records`` are all unfinished batches. Only an owner whose results have grown since the
        last look, or who is held, is summed up.
        """
        context, slots = self._context, self._context.slots
        free_bytes = await context.threads.run(context.directory.free_bytes)
        quota_bytes = context.limits.quota_bytes(free_bytes)
        if quota_bytes is None:
            self._written_bytes.clear()
            slots.hold({})
            return
        written = Counter[str]()
        for record in records:
            written[record.owner] += record.progress.output_bytes + record.progress.error_bytes
        before, self._written_bytes = self._written_bytes, dict(written)
        held: dict[str, str] = {}
        for owner, size_bytes in written.items():
            if size_bytes == before.get(owner) and owner not in slots.held:
                continue
            used_bytes, _ = await context.store.lists.run(file_rows.stored, owner)
            if used_bytes > quota_bytes:
                held[owner] = (
                    f"this key has {used_bytes:,} bytes of files, and may have {quota_bytes:,}: its"
                    " batches wait for room: cancel a batch or delete files"
                )
        slots.hold(held)

    async def _count_delays(self) -> None:
        while True:
            await self._context.clock.sleep(COUNT_INTERVAL_S)
            ran, self._uncounted = self._uncounted, set(self._drivers)
            await self._add_delays(ran)

    async def _add_delays(self, ran: Collection[str]) -> None:
        """Add what was billed since the last time to the rows of batches, also of those that have
        ended: an online request is billed when it has ended itself.

        Batches that ``ran`` since then and were not billed are known to have delayed nobody. If
        the database cannot be written, what was billed is added next time.
        """
        billed_s = await self._context.backend.online_delays_s()
        if billed_s is None:
            return
        before_s = self._billed_s
        added_s = {batch_id: 0.0 for batch_id in ran if batch_id not in before_s}
        for batch_id, seconds in billed_s.items():
            if seconds != before_s.get(batch_id):
                added_s[batch_id] = seconds - before_s.get(batch_id, 0.0)
        if added_s:
            await self._context.store.run(batch_rows.add_online_delays, added_s)
        # The engine forgets what was billed long ago, and would begin again at 0.
        self._billed_s = dict.fromkeys(ran, 0.0) | dict(billed_s)
