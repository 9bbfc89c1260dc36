"""Drives one batch from state to state until it is in a final one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from sglang_coserve.batch.context import JobContext
from sglang_coserve.batch.job_lines import JobLines
from sglang_coserve.batch.record import JobRecord, Status
from sglang_coserve.batch.schemas import WaitingFor, mixed_models
from sglang_coserve.batch.state import (
    DeadlinePassed,
    Event,
    Failed,
    Finalized,
    LinesFinished,
    Progressed,
    ServedBy,
)
from sglang_coserve.batch.store import batch_rows
from sglang_coserve.errors import StorageError
from sglang_coserve.jsonl.check_file import LineFault
from sglang_coserve.lines.background import backoff_s
from sglang_coserve.lines.fair_slots import JobShare, LineWait

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

BATCH_TASK: Final = "batch"
"""What drivers are called in the state of the process's tasks."""

_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0
"""How often a batch is tried again while its disk fails, or whatever else is wrong."""

_CLOCK_LOOK_S: Final = 60.0
"""How late a window may close after somebody has set the clock, or the machine has slept."""

_DISK_FAULT: Final = "storage_failed"

_MAX_FAILURES = 5
"""How often a batch whose window has closed, or that is cancelled, is tried again before it
fails."""


class JobDriver:
    """Does the work of a batch's state from its construction on, and again whenever the state has
    changed.

    So restarts and full disks need no code of their own: the state alone says what is to be done
    next.
    """

    def __init__(self, record: JobRecord, context: JobContext) -> None:
        self.record = record
        """The latest state that this driver has seen."""

        self.share = JobShare(record.owner, record.priority, record.expires_at_s)
        self._context = context
        self._changed = asyncio.Event()
        self._failures = 0
        self._fault: LineFault | None = None
        """Of the latest attempt to make progress; None while there is some."""

        self.task = context.background.start(BATCH_TASK, self._run, record.id)
        """Ends with the batch; it is cancelled when the service is closed. The next driver goes on
        from there."""

    @property
    def stalled_by(self) -> str | None:
        """Why the batch makes no progress; None while it does."""
        if self._fault is not None:
            return self._fault.message
        if not self.record.will_be_served:
            return None
        return self._context.backend.stalled_by or self._context.slots.held.get(self.record.owner)

    def waiting_for(self, batch: JobRecord) -> WaitingFor | None:
        """Return what the batch waits for; None while its lines run, and without any left to run.

        ``batch`` is the batch as it is now, which this driver may not have seen yet.
        """
        share, backend = self.share, self._context.backend
        if batch.status is Status.IN_PROGRESS and batch.is_paused:
            return "paused"
        if self._fault is not None:
            return "disk" if self._fault.code == _DISK_FAULT else "error"
        if batch.status is Status.VALIDATING:
            return "check"
        if batch.status is not Status.IN_PROGRESS:
            return None
        if backend.stalled_by:
            return "engine"
        if share.lines_in_engine:
            return None
        if batch.owner in self._context.slots.held:
            return "quota"
        if backend.is_changing:
            return "model"
        waits: tuple[LineWait, ...] = ("suspect", "model", "engine", "slot")
        return next((each for each in waits if share.waits[each]), None)

    @property
    def is_in_engine(self) -> bool:
        """True while a line of the batch is being served."""
        return self.share.lines_in_engine > 0

    def notice_change(self) -> None:
        """Interrupt the current work, because the state has changed."""
        self._changed.set()

    async def _run(self) -> None:
        work: tuple[Status, bool] | None = None
        while not self.record.status.is_final:
            # Before the state is read: a change after that is noticed.
            self._changed.clear()
            try:
                self.record = await self._context.store.run(batch_rows.find, self.record.id)
                before, work = work, (self.record.status, self.record.is_paused)
                if work != before:
                    self._forget_failures()  # They were of other work.
                await self._advance(self.record)
                self._forget_failures()
            except _InterruptedError:
                continue
            except StorageError as error:
                text = self._context.directory.told(error)
                await self._pause(LineFault(_DISK_FAULT, text), error)
            except Exception as error:
                # It stops neither other batches nor what its owner asks of this one.
                self._context.background.note_failure(BATCH_TASK, error, self.record.id)
                # The rest is for the log: it may say anything about this machine.
                text = f"internal error: {type(error).__name__}; it is tried again"
                await self._pause(LineFault("internal_error", text), error)

    def _forget_failures(self) -> None:
        self._fault = None
        self._failures = 0

    async def _pause(self, fault: LineFault, error: Exception) -> None:
        """Wait for what has failed to recover; fail a batch that has tried often enough."""
        if fault != self._fault:
            _log.error("batch %s waits: %s", self.record.id, error)
        self._fault = fault
        self._failures += 1
        context = self._context
        pause_s = backoff_s(self._failures, _FIRST_PAUSE_S, _MAX_PAUSE_S, context.rng)
        # What fails here fails again in the next attempt, and is noted there.
        with suppress(Exception):
            await self._uninterrupted(context.clock.sleep(pause_s))
            batch = self.record
            is_over = batch.status is Status.CANCELLING or self._left_s(batch) <= 0
            if is_over and self._failures >= _MAX_FAILURES:
                lines, found = self._lines(batch), None
                with suppress(StorageError):
                    found = await lines.found()
                with suppress(StorageError):  # If this fails, too, it costs space alone.
                    await lines.forget()
                await self._apply(Failed((fault,), found), batch)

    async def _advance(self, batch: JobRecord) -> None:
        match batch.status:
            case Status.VALIDATING:
                checked = await self._uninterrupted(self._lines(batch).check())
                await self._apply(checked, batch)
            # Before window and pauses: either may come while the last record is being written.
            case Status.IN_PROGRESS if batch.progress.lines == batch.total_lines:
                await self._apply(LinesFinished(), batch)
            case Status.IN_PROGRESS if self._left_s(batch) <= 0:
                # A crash may have come between the last record and its count.
                await self._lines(batch).count()
                if self.record.progress.lines < batch.total_lines:
                    await self._apply(DeadlinePassed(), batch)
            case Status.IN_PROGRESS if batch.is_paused:
                await self._uninterrupted(self._window_closed(batch))
            case Status.IN_PROGRESS:
                await self._serve(batch)
            case Status.FINALIZING:
                await self._finalize(batch)
            case Status.CANCELLING:
                lines = self._lines(batch)
                await lines.count()
                await self._end(lines, batch)

    async def _serve(self, batch: JobRecord) -> None:
        await self._uninterrupted(self._serve_lines(batch), self._window_closed(batch))
        served = self.record.progress.lines
        if served != batch.total_lines:
            raise StorageError(
                f"{batch.input_file_id} has changed: {served} of {batch.total_lines} requests"
                " are there; restore it, or cancel the batch"
            )

    async def _serve_lines(self, batch: JobRecord) -> None:
        await self._context.backend.settled()  # Tokens are kept for the model that there is then.
        await self._lines(batch).serve()

    async def _finalize(self, batch: JobRecord) -> None:
        lines = self._lines(batch)
        if batch.is_past_deadline:
            message = f"the window of {batch.completion_window} closed before this line was served"
            await lines.give_up("batch_expired", message)
        else:
            await lines.count()
        await self._end(lines, batch)

    async def _end(self, lines: JobLines, batch: JobRecord) -> None:
        """End a batch whose records are written and counted."""
        await lines.forget()
        await self._apply(Finalized(), batch)

    def _lines(self, batch: JobRecord) -> JobLines:
        return JobLines(batch, self.share, self._context, self._note)

    async def _note(self, event: Progressed | ServedBy) -> None:
        """Take the batch through what its lines have to say, whatever its state is by now."""
        before, self.record = self.record, await self._context.apply(self.record.id, event)
        if self.record.progress.lines > before.progress.lines:
            self._forget_failures()
        if isinstance(event, ServedBy) and self.record.earlier_model_lines:
            _log.warning("batch %s: %s", self.record.id, mixed_models(self.record, event.model))

    async def _apply(self, event: Event, batch: JobRecord) -> None:
        """Take the batch through ``event``, unless its state is no longer that of ``batch``."""
        self.record = await self._context.apply(batch.id, event, expected=batch.status)

    def _left_s(self, batch: JobRecord) -> float:
        return batch.expires_at_s - self._context.clock.now_s()

    async def _window_closed(self, batch: JobRecord) -> None:
        """Wait for it, by a clock that may be set meanwhile."""
        while (left_s := self._left_s(batch)) > 0:
            await self._context.clock.sleep(min(left_s, _CLOCK_LOOK_S))

    async def _uninterrupted(
        self, work: Coroutine[Any, Any, _T], *others: Coroutine[Any, Any, None]
    ) -> _T:
        """Return what ``work`` returns.

        Raises:
            _InterruptedError: the state has changed, or one of ``others`` has ended, before that.
                ``work`` has been cancelled and has ended.
        """
        task = asyncio.create_task(work)
        interrupts = [asyncio.create_task(each) for each in (self._changed.wait(), *others)]
        try:
            await asyncio.wait({task, *interrupts}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _InterruptedError
            return task.result()
        finally:
            for each in (task, *interrupts):
                each.cancel()
            await asyncio.gather(task, *interrupts, return_exceptions=True)


class _InterruptedError(Exception):
    """The state has changed, or the window has closed, before the work was done."""
