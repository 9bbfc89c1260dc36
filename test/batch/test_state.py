"""The life of a batch: every sequence of events leads somewhere legal, or changes nothing."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batch.records import a_batch
from sglang_coserve.batch.errors import ConflictError
from sglang_coserve.batch.record import JobRecord, Status
from sglang_coserve.batch.state import (
    Asked,
    DeadlinePassed,
    Event,
    Failed,
    Finalized,
    LinesFinished,
    Progressed,
    Validated,
    transition,
)
from sglang_coserve.jsonl.check_file import LineFault
from sglang_coserve.lines.result_record import Progress

USER_EVENTS = (Asked("cancel"), Asked("pause"), Asked("resume"))
LEGAL = {
    Status.VALIDATING: {Status.IN_PROGRESS, Status.FAILED, Status.CANCELLING},
    Status.IN_PROGRESS: {Status.FINALIZING, Status.FAILED, Status.CANCELLING},
    Status.FINALIZING: {Status.COMPLETED, Status.EXPIRED, Status.FAILED},
    Status.CANCELLING: {Status.CANCELLED, Status.FAILED},
}


class LifeOfABatch(RuleBasedStateMachine):
    """Events in any order a driver and its users can produce them."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = a_batch()
        self.now_s = 0.0
        self.history = [self.batch.status]

    def happens(self, event: Event) -> None:
        self.now_s += 1.0
        before = self.batch
        self.batch = transition(before, event, self.now_s)
        if self.batch.status is not before.status:
            assert self.batch.status in LEGAL[before.status]
            self.history.append(self.batch.status)
            moment = f"{self.batch.status}_at_s"
            assert getattr(before, moment) is None
            assert getattr(self.batch, moment) == self.now_s

    @rule(event=st.sampled_from(USER_EVENTS))
    def a_user_asks(self, event: Asked) -> None:
        before = self.batch
        pending = before.status in (Status.VALIDATING, Status.IN_PROGRESS)
        if pending or (before.status is Status.CANCELLING and event == Asked("cancel")):
            self.happens(event)
            once = self.batch
            self.happens(event)
            assert self.batch == once
            if event != Asked("cancel"):
                assert once == replace(before, is_paused=event == Asked("pause"))
        else:
            with pytest.raises(ConflictError, match=f"it is {before.status}"):
                transition(before, event, self.now_s)

    @precondition(lambda self: self.batch.status is Status.VALIDATING)
    @rule(total_lines=st.integers(1, 5))
    def the_input_is_good(self, total_lines: int) -> None:
        self.happens(Validated(total_lines, estimated_tokens=10 * total_lines))

    @precondition(lambda self: not self.batch.status.is_final)
    @rule()
    def the_input_or_the_disk_is_bad(self) -> None:
        self.happens(Failed((LineFault("invalid_json", "no", 3),)))
        assert self.batch.faults

    @precondition(lambda self: self.batch.progress.lines < self.batch.total_lines)
    @rule(is_ok=st.booleans())
    def a_line_finishes(self, is_ok: bool) -> None:
        if self.batch.status in (
            Status.IN_PROGRESS,
            Status.FINALIZING,
            Status.CANCELLING,
        ):
            progress = self.batch.progress
            more = Progress(progress.completed + is_ok, progress.failed + (not is_ok))
            self.happens(Progressed(more))
            self.happens(Progressed(more))

    @precondition(lambda self: self.batch.status is Status.IN_PROGRESS)
    @rule()
    def the_driver_looks(self) -> None:
        if self.batch.progress.lines == self.batch.total_lines:
            self.happens(LinesFinished())

    @precondition(lambda self: self.batch.status is Status.IN_PROGRESS)
    @rule()
    def the_window_closes(self) -> None:
        self.happens(DeadlinePassed())

    @precondition(lambda self: self.batch.status is Status.FINALIZING)
    @rule()
    def the_files_are_complete(self) -> None:
        self.happens(
            Progressed(
                replace(
                    self.batch.progress,
                    failed=self.batch.total_lines - self.batch.progress.completed,
                )
            )
        )
        self.happens(Finalized())

    @precondition(lambda self: self.batch.status is Status.CANCELLING)
    @rule()
    def the_engine_has_let_go(self) -> None:
        self.happens(Finalized())

    @precondition(lambda self: self.batch.status.is_final)
    @rule()
    def nothing_happens_after_the_end(self) -> None:
        for event in (Validated(1, 1), Progressed(Progress()), LinesFinished(), DeadlinePassed()):
            with pytest.raises(AssertionError):
                transition(self.batch, event, self.now_s)

    @initialize()
    def begins(self) -> None:
        assert self.batch.status is Status.VALIDATING

    @invariant()
    def the_record_tells_its_history(self) -> None:
        assert len(set(self.history)) == len(self.history), "a state was entered twice"
        for field in fields(JobRecord):
            others = ("created_at_s", "expires_at_s", "last_record_at_s")
            if field.name.endswith("_at_s") and field.name not in others:
                entered = Status(field.name.removesuffix("_at_s")) in self.history
                assert (getattr(self.batch, field.name) is not None) == entered
        if self.batch.status in (Status.COMPLETED, Status.EXPIRED):
            assert self.batch.progress.lines == self.batch.total_lines
        assert (self.batch.status is Status.FAILED) == bool(self.batch.faults)


TestLifeOfABatch = LifeOfABatch.TestCase
