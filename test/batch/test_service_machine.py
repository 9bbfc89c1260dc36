"""Batches, users, the engine, time and restarts in any order: every line has its one record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from batch.manual_clock import ManualClock
from batch.scenarios import FINAL, OWNER, Scene, lines, opened
from batch.scripted_backend import ScriptedBackend, answer, failure
from sglang_coserve.batch.errors import ConflictError
from sglang_coserve.batch.schemas import BatchObject, RequestCounts
from sglang_coserve.batch.state import BatchAction

T = TypeVar("T")

WINDOW_S = 3600
MAX_IN_FLIGHT = 4
PICK = st.integers(0, 1000)


class AnyOrder(RuleBasedStateMachine):
    """Threads and processes take their own time, so the rules ask for nothing but to go on.

    What they pick is chosen from what is there at that moment, by a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = TemporaryDirectory()
        self.clock = ManualClock()
        self.sizes: dict[str, int] = {}
        self.finished_lines: dict[str, int] = {}
        self.scene: Scene = self.run(self.open())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def open(self) -> Scene:
        return await opened(
            Path(self.directory.name),
            ScriptedBackend(holds=True, tokens_per_s=50.0),
            self.clock,
            max_in_flight=MAX_IN_FLIGHT,
            max_attempts=2,
        )

    async def go_on(self, turns: int = 5) -> None:
        for _ in range(turns):
            await asyncio.sleep(0.001)
            self.clock.advance(0.05)

    async def batches(self) -> list[BatchObject]:
        return (await self.scene.service.list_batches(OWNER, limit=100)).data

    async def counts_and_records(self, batch_id: str) -> tuple[RequestCounts, int]:
        """What a batch counts and how many records its files have, at one time."""
        while True:
            batch = await self.scene.service.retrieve_batch(OWNER, batch_id)
            records = await self.scene.records(batch)
            after = await self.scene.service.retrieve_batch(OWNER, batch_id)
            if after.request_counts == batch.request_counts:
                return after.request_counts, len(records)

    def picked(self, pick: int) -> str | None:
        ids = sorted(self.sizes)
        return ids[pick % len(ids)] if ids else None

    @rule(count=st.integers(1, 8), priority=st.integers(0, 1))
    def somebody_submits(self, count: int, priority: int) -> None:
        if len(self.sizes) < 4:
            content = lines(count, f"b{len(self.sizes)}", max_tokens=20)
            window = f"{WINDOW_S}s"
            batch = self.run(self.scene.create(content, window, priority=priority))
            self.sizes[batch.id] = count

    @rule(pick=PICK, what=st.sampled_from(get_args(BatchAction)))
    def somebody_asks(self, pick: int, what: BatchAction) -> None:
        if (batch_id := self.picked(pick)) is not None:
            try:
                shown = self.run(self.scene.service.change_batch(OWNER, batch_id, what))
            except ConflictError:
                return
            assert what == "cancel" or shown.coserve.paused == (what == "pause")

    @rule(picks=st.lists(PICK, max_size=4), how=st.sampled_from(["well", "400", "retry"]))
    def the_engine_answers(self, picks: list[int], how: str) -> None:
        for pick in picks:
            if self.scene.backend.in_flight:
                entry = self.scene.backend.in_flight[pick % len(self.scene.backend.in_flight)]
                entry.finish(
                    {
                        "well": answer(entry.request),
                        "400": failure(400),
                        "retry": failure(503, is_retryable=True),
                    }[how]
                )
        self.run(self.go_on())

    @rule(pick=PICK, count=st.integers(1, 5))
    def the_engine_generates(self, pick: int, count: int) -> None:
        if self.scene.backend.in_flight:
            entry = self.scene.backend.in_flight[pick % len(self.scene.backend.in_flight)]
            if entry.generated + count <= 20:
                entry.generate(count)
        self.run(self.go_on())

    @rule(turns=st.integers(5, 100))
    def time_passes(self, turns: int) -> None:
        self.run(self.go_on(turns))

    @rule()
    def the_windows_close(self) -> None:
        self.clock.advance(WINDOW_S)
        self.run(self.go_on())

    @rule()
    def the_server_restarts(self) -> None:
        self.run(self.scene.service.close())
        assert self.scene.backend.in_flight == []
        self.scene = self.run(self.open())

    @invariant()
    def the_engine_has_what_it_may(self) -> None:
        assert len(self.scene.backend.in_flight) <= MAX_IN_FLIGHT
        in_flight = [(e.request.batch_id, e.request.line) for e in self.scene.backend.in_flight]
        assert len(set(in_flight)) == len(in_flight), "a line is in flight twice"

    @invariant()
    def counts_only_grow_and_are_what_the_files_hold(self) -> None:
        for batch in self.run(self.batches()):
            counts, records = self.run(self.counts_and_records(batch.id))
            finished = counts.completed + counts.failed
            assert self.finished_lines.get(batch.id, 0) <= finished <= counts.total
            self.finished_lines[batch.id] = finished
            assert records == finished

    def teardown(self) -> None:
        self.run(self.everything_ends())
        self.run(self.scene.service.close())
        self.loop.close()
        self.directory.cleanup()

    async def everything_ends(self) -> None:
        backend = self.scene.backend
        backend.holds = False
        backend.finish_all()
        for batch_id, size in self.sizes.items():
            now = await self.scene.service.retrieve_batch(OWNER, batch_id)
            if now.coserve.paused and now.status in ("validating", "in_progress"):
                with suppress(ConflictError):
                    await self.scene.service.change_batch(OWNER, batch_id, "resume")
            done = await self.scene.reaches(batch_id, *FINAL)
            records = await self.scene.records(done)
            counts = done.request_counts
            assert len(records) == counts.completed + counts.failed
            if done.status != "cancelled":
                assert done.status in ("completed", "expired")
                assert len(records) == counts.total == size
            for record in records.values():
                check_answer(record)
        status = await self.scene.service.status()
        assert not status.batches
        assert (status.lines_in_flight, status.bytes_in_flight, status.lines_waiting) == (0, 0, 0)
        assert list((self.scene.directory / "journal").iterdir()) == []


def check_answer(record: dict[str, Any]) -> None:
    """An answer is that of the line it says it is of."""
    if record["response"] and record["response"]["status_code"] == 200:
        prompt = record["custom_id"]
        text = record["response"]["body"]["choices"][0]["text"]
        assert record["response"]["request_id"] == f"cmpl-{prompt}"
        assert len(text.split()) == 20, json.dumps(record)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=15, stateful_step_count=20)
