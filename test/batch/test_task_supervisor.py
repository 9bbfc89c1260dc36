"""Tasks and threads that fail are told of, and go on."""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from batch.manual_clock import ManualClock
from batch.scenarios import OWNER, lines, opened, stream, wanted
from batch.scripted_backend import ScriptedBackend
from sglang_coserve.batch.schemas import ExpiresAfter
from sglang_coserve.batch.store import file_rows
from sglang_coserve.lines.background import TaskSupervisor
from waiting import GIVE_UP_S


async def test_a_task_that_fails_is_started_again_after_growing_pauses() -> None:
    clock = ManualClock()
    supervisor = TaskSupervisor(clock, random.Random(0))
    began_s: list[float] = []

    async def work() -> None:
        began_s.append(clock.now_s())
        if len(began_s) <= 8:
            raise RuntimeError("out of luck")

    async with supervisor.running("work", work):
        await clock.until(lambda: len(began_s) == 9)
    pauses_s = [after - before for before, after in pairwise(began_s)]
    assert 0.25 <= pauses_s[0] <= 0.6
    assert all(5.0 <= pause_s <= 10.1 for pause_s in pauses_s[5:])
    state = supervisor.state()["work"]
    assert (state["running"], state["failures"]) == (0, 8)
    assert state["last_error"] == "RuntimeError: out of luck"
    assert state["last_failure_at"] == began_s[7]


async def test_a_task_knows_nothing_of_the_request_that_starts_it() -> None:
    said = contextvars.ContextVar("what a client says", default="nothing")
    heard: list[str] = []

    async def work() -> None:
        heard.append(said.get())

    said.set("online")
    await TaskSupervisor(ManualClock()).start("work", work)
    assert heard == ["nothing"]


async def test_a_task_ends_when_it_is_cancelled_or_done_and_not_with_what_it_awaits() -> None:
    supervisor = TaskSupervisor(ManualClock())
    awaited = asyncio.get_running_loop().create_future()

    async def waits() -> None:
        await awaited

    task = supervisor.start("waits", waits)
    await asyncio.sleep(0)
    awaited.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    assert supervisor.state()["waits"]["failures"] == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert supervisor.state()["waits"]["running"] == 0

    async def ends() -> None:
        pass

    await asyncio.wait_for(supervisor.start("ends", ends), GIVE_UP_S)
    assert supervisor.state()["ends"] == {
        "running": 0,
        "failures": 0,
        "last_error": None,
        "last_failure_at": None,
    }


def test_a_thread_that_fails_goes_on() -> None:
    supervisor, has_ended, attempts = TaskSupervisor(), threading.Event(), []

    def work() -> None:
        attempts.append(threading.current_thread())
        if len(attempts) == 1:
            raise OSError("the disk is gone")
        has_ended.set()

    supervisor.start_thread("work", work)
    assert has_ended.wait(GIVE_UP_S)
    attempts[0].join(GIVE_UP_S)
    state = supervisor.state()["work"]
    assert (state["running"], state["failures"]) == (0, 1)
    assert state["last_error"] == "OSError: the disk is gone"


async def test_expired_files_go_also_when_a_batch_has_just_begun_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True))
    async with scene.service as service:
        in_an_hour = ExpiresAfter(anchor="created_at", seconds=3600)
        used, unused = [
            await service.create_file(OWNER, "f", stream(lines(1)), lambda: in_an_hour)
            for _ in range(2)
        ]
        await service.create_batch(OWNER, wanted(used))
        # As if it had begun after they were listed.
        listed, listed_once = file_rows.expired, []

        def expired(connection: object, now_s: float, limit: int) -> list[tuple[str, str]]:
            found = listed(connection, now_s, limit)
            if found and not listed_once:
                listed_once.append(True)
                found.insert(0, (OWNER, used.id))
            return found

        monkeypatch.setattr(file_rows, "expired", expired)
        scene.clock.advance(3600)
        await scene.clock.until(lambda: not (tmp_path / "files" / unused.id).exists())
        assert listed_once and (tmp_path / "files" / used.id).exists()
        assert service.context.background.state()["file_expiry"]["failures"] == 0


async def test_a_service_goes_on_whatever_a_task_of_it_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ScriptedBackend()
    scene = await opened(tmp_path, backend)
    async with scene.service as service:
        state = service.context.background.state
        names = {"file_expiry", "batch_slots", "batch_quotas", "online_delays"}
        assert {name for name, each in state().items() if each["running"]} == names
        wrong = {"batch_slots": "load", "online_delays": "online_delays_s"}

        def fail() -> None:
            raise ArithmeticError("out of luck")

        for method in wrong.values():
            monkeypatch.setattr(backend, method, fail)
        await scene.clock.until(lambda: all(state()[name]["failures"] > 1 for name in wrong))
        monkeypatch.undo()
        backend.delays_s = {}
        batch = await scene.create(lines(2))
        assert (await scene.ends(batch.id)).status == "completed"
        failures = {name: state()[name]["failures"] for name in wrong}
        scene.clock.advance(30)
        await asyncio.sleep(0.1)
        assert {name: state()[name]["failures"] for name in wrong} == failures
        assert {name for name, each in state().items() if each["running"]} == names
    assert not any(each["running"] for each in state().values())
