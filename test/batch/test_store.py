"""Rows and their transactions: what is there, what is refused, and databases of other versions."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batch.records import a_batch, a_file
from sglang_coserve.batch.errors import NotFoundError
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.record import Status
from sglang_coserve.batch.state import (
    Asked,
    Failed,
    Finalized,
    LinesFinished,
    Progressed,
    Validated,
)
from sglang_coserve.batch.store import MOST_ROWS, Store, batch_rows, file_rows
from sglang_coserve.batch.store.database import LAYOUT, open_database
from sglang_coserve.errors import StartupError, StorageError
from sglang_coserve.jsonl.check_file import LineFault
from sglang_coserve.lines.result_record import Progress, Usage
from sglang_coserve.web.errors import ApiError

FREE_BYTES = 1 << 40


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = open_database(tmp_path / "db")
    yield connection
    connection.close()


async def test_a_transaction_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    def insert_and_fail(connection: sqlite3.Connection) -> None:
        file_rows.insert(connection, a_file())
        raise ValueError("no")

    store = await Store.open(tmp_path / "db")
    with pytest.raises(ValueError, match="no"):
        await store.run(insert_and_fail)
    assert not await store.run(file_rows.exists, "file-1")
    await store.run(file_rows.insert, a_file())
    with pytest.raises(StorageError, match="UNIQUE constraint"):
        await store.run(file_rows.insert, a_file())
    assert await store.run(file_rows.exists, "file-1")
    await store.close()


async def test_a_full_disk_is_named_and_changes_nothing(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "db")
    pages = await store.run(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
    await store._thread.run(lambda: store._connection.execute(f"PRAGMA max_page_count={pages}"))
    with pytest.raises(StorageError, match="full"):
        for number in range(1000):
            await store.run(file_rows.insert, a_file(f"file-{number}", filename="x" * 200))
    count = await store.run(lambda db: db.execute("SELECT count(*) FROM files").fetchone()[0])
    assert count == number
    await store.close()


async def test_a_full_disk_gets_the_room_that_others_can_do_without(tmp_path: Path) -> None:
    asked = 0

    def make_room() -> None:
        nonlocal asked
        asked += 1
        store._connection.execute("PRAGMA max_page_count=1000000")

    store = await Store.open(tmp_path / "db", make_room)
    pages = await store.run(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
    await store._thread.run(lambda: store._connection.execute(f"PRAGMA max_page_count={pages}"))
    for number in range(100):
        await store.run(file_rows.insert, a_file(f"file-{number}", filename="x" * 200))
    count = await store.run(lambda db: db.execute("SELECT count(*) FROM files").fetchone()[0])
    assert (count, asked) == (100, 1)
    await store.close()


def ended(connection: sqlite3.Connection, number: int, limits: BatchLimits, **changes: Any) -> None:
    """A batch of ``o`` that has been created, and has failed, at ``number`` seconds."""
    batch = a_batch(id=f"batch_{number}", created_at_s=float(number), **changes)
    if batch.response is not None:
        batch = replace(batch, input_file_id=f"file-of-{number}")
        file_rows.insert(connection, a_file(batch.input_file_id, batch.owner, purpose="response"))
    batch_rows.create(connection, batch, limits, FREE_BYTES)
    batch_rows.apply(connection, batch.id, Failed(()), float(number))


def left(connection: sqlite3.Connection) -> list[str]:
    return [batch.id for batch in batch_rows.page(connection, None, after=None, limit=1000)]


@pytest.mark.parametrize("response", [None, {}], ids=["batches", "responses"])
def test_the_oldest_ended_rows_of_an_owner_go(
    connection: sqlite3.Connection, response: dict[str, Any] | None
) -> None:
    limits = BatchLimits(max_ended_batches_per_owner=3)
    file_rows.insert(connection, a_file())
    file_rows.insert(connection, a_file("file-4", owner="other"))
    ended(connection, 0, limits, owner="other", input_file_id="file-4", response=response)
    batch_rows.create(connection, a_batch(), limits, FREE_BYTES)
    for number in range(2, 9):
        ended(connection, number, limits, response=response)
    assert left(connection) == [f"batch_{number}" for number in (8, 7, 6, 5, 1, 0)]


def test_ended_rows_of_an_owner_have_a_quota(connection: sqlite3.Connection) -> None:
    limits = BatchLimits(max_ended_bytes_per_owner=110_000)
    file_rows.insert(connection, a_file())
    metadata = {f"{n}": "\U0001f600" * 512 for n in range(16)}
    for number in range(6):
        ended(connection, number, limits, metadata=metadata)
    assert left(connection) == ["batch_5", "batch_4", "batch_3", "batch_2"]
    (size_bytes,) = connection.execute("SELECT sum(row_bytes) FROM batches").fetchone()
    assert 4 * 16 * 2048 < size_bytes < 4 * 16 * 2048 + 4 * 1400


def plans(connection: sqlite3.Connection, work: Callable[[], object]) -> list[str]:
    """How SQLite goes about each statement of ``work``."""
    asked: list[str] = []
    connection.set_trace_callback(asked.append)
    work()
    connection.set_trace_callback(None)
    return [step[3] for each in asked for step in connection.execute(f"EXPLAIN QUERY PLAN {each}")]


QUERIES: dict[str, Callable[[sqlite3.Connection], object]] = {
    "create": lambda db: batch_rows.create(db, a_batch(id="batch_9"), BatchLimits(), FREE_BYTES),
    "batches": lambda db: batch_rows.page(db, "o", after=None, limit=9),
    "files": lambda db: file_rows.page(
        db, "o", 0.0, after=None, limit=9, is_ascending=True, purpose=None
    ),
    "parts of an upload": lambda db: file_rows.with_purpose(db, "o", "upload/1"),
    "expired files": lambda db: file_rows.expired(db, 5.0, 9),
    "unfinished batches": batch_rows.unfinished,
    "old batches": lambda db: batch_rows.delete_old(db, 0.5, 9.0, are_responses=False),
    "delete a file": lambda db: file_rows.delete(db, "o", "file-1"),
}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_no_query_looks_at_all_rows(
    connection: sqlite3.Connection, query: Callable[[sqlite3.Connection], object]
) -> None:
    file_rows.insert(connection, a_file())
    found = plans(connection, lambda: query(connection))
    assert found
    assert [step for step in found if step.startswith(("SCAN files", "SCAN batches"))] == [
        step for step in found if step == "SCAN batches USING INDEX batches_unfinished"
    ]


def test_batches_whose_time_is_over_go_and_others_stay(connection: sqlite3.Connection) -> None:
    file_rows.insert(connection, a_file())
    batch_rows.create(connection, a_batch(id="batch_9"), BatchLimits(), FREE_BYTES)
    for number in range(3):
        ended(connection, number, BatchLimits())
    assert not batch_rows.delete_old(connection, 1.0, 2000.0, are_responses=False)
    assert left(connection) == ["batch_2", "batch_9"]
    assert file_rows.find(connection, "o", "file-1", 2000.0)


def test_a_list_goes_on_behind_what_is_gone(connection: sqlite3.Connection) -> None:
    def files(after: str | None, is_ascending: bool = False) -> list[str]:
        found = file_rows.page(
            connection, "o", 0.0, after=after, limit=2, is_ascending=is_ascending, purpose=None
        )
        return [file.id for file in found]

    for number in range(1, 6):
        file_rows.insert(connection, a_file(f"file-{number}", expires_at_s=10.0 * number))
        ended(connection, number, BatchLimits(), input_file_id=f"file-{number}")
    for number in (2, 3):
        file_rows.delete(connection, "o", f"file-{number}")
    connection.execute("DELETE FROM batches WHERE id = 'batch_3'")
    assert files("file-3") == ["file-1"]
    assert files("file-2", is_ascending=True) == ["file-4", "file-5"]
    batches = batch_rows.page(connection, "o", after="batch_3", limit=1)
    assert [batch.id for batch in batches] == ["batch_2"]
    for after, owner in (("file-3", "other"), ("file-9", "o"), ("batch_9", "o")):
        with pytest.raises(NotFoundError) as caught:
            file_rows.page(
                connection, owner, 0.0, after=after, limit=2, is_ascending=True, purpose=None
            )
        assert caught.value.param == "after"


def test_a_batch_is_stored_as_it_is(connection: sqlite3.Connection) -> None:
    file_rows.insert(connection, a_file())
    batch = a_batch(
        metadata={"a": "b'; DROP TABLE batches; --", "\u2603": ""},
        idempotency_key="k",
        output_expires_after_s=3600.0,
        priority=-3,
    )
    batch_rows.create(connection, batch, BatchLimits(), FREE_BYTES)
    assert batch_rows.find(connection, batch.id) == batch
    faults = (LineFault("invalid_json", "no", 3, None), LineFault("x", "y", None, "url"))
    failed = batch_rows.apply(connection, batch.id, Failed(faults), 5.0)
    assert failed == replace(batch, status=Status.FAILED, failed_at_s=5.0, faults=faults)
    assert batch_rows.find(connection, batch.id, "o") == failed
    assert batch_rows.unfinished(connection) == []


def test_what_sqlite_cannot_hold_is_stored_as_it_is(connection: sqlite3.Connection) -> None:
    """And stays so through changes that SQLite makes to a record."""
    file_rows.insert(connection, a_file(purpose="response"))
    repeated = {"user": "half \ud83d", "\udc00": [2**53 + 1, 2**64, -(2**70), 0.1], "none": None}
    batch = a_batch(response=repeated, idempotency_key="k", estimated_tokens=2**53 + 1)
    batch_rows.create(connection, batch, BatchLimits(), FREE_BYTES)
    batch_rows.add_online_delays(connection, {"batch_1": 0.25})
    batch_rows.add_online_delays(connection, {"batch_1": 0.5, "batch_unknown": 1.0})
    batch_rows.move_owner(connection, "o", "other")
    expected = replace(batch, owner="other", online_delay_s=0.75)
    assert batch_rows.find(connection, "batch_1", "other") == expected
    assert batch_rows.find_response(connection, "batch_1", "other") == expected
    assert batch_rows.find_repeated(connection, expected) == expected
    assert file_rows.find(connection, "other", "file-1", 0.0) == a_file(
        owner="other", purpose="response"
    )


def test_a_key_that_the_other_owner_has_used_is_forgotten(connection: sqlite3.Connection) -> None:
    for number, owner in enumerate(("o", "other")):
        file_rows.insert(connection, a_file(f"file-{number}", owner))
        batch = a_batch(
            id=f"batch_{number}", owner=owner, input_file_id=f"file-{number}", idempotency_key="k"
        )
        batch_rows.create(connection, batch, BatchLimits(), FREE_BYTES)
    assert batch_rows.move_owner(connection, "o", "other") == (1, 1)
    moved = batch_rows.page(connection, "other", after=None, limit=9)
    assert [(each.id, each.idempotency_key) for each in moved] == [
        ("batch_1", "k"),
        ("batch_0", None),
    ]


@pytest.mark.parametrize("status", Status)
def test_a_batch_in_a_final_state_is_not_unfinished(
    connection: sqlite3.Connection, status: Status
) -> None:
    file_rows.insert(connection, a_file())
    times = {} if status is Status.VALIDATING else {f"{status}_at_s": 5.0}
    batch_rows.create(connection, a_batch(status=status, **times), BatchLimits(), FREE_BYTES)
    assert bool(batch_rows.unfinished(connection)) == (not status.is_final)
    batch_rows.delete_old(connection, 5.0, 9.0, are_responses=False)
    assert bool(left(connection)) == (not status.is_final)


def test_records_of_other_versions_are_read(connection: sqlite3.Connection) -> None:
    """A field that is missing has its default, and one that is not known is passed over."""
    file_rows.insert(connection, a_file())
    batch_rows.create(connection, a_batch(priority=3), BatchLimits(), FREE_BYTES)
    connection.execute(
        "UPDATE batches SET record = json_remove(json_set(record, '$.tags', json('[1]'),"
        " '$.progress.usage.audio_tokens', 7), '$.earlier_model_lines', '$.progress.failed')"
    )
    assert batch_rows.find(connection, "batch_1") == a_batch(priority=3)
    changed = batch_rows.apply(connection, "batch_1", Asked("pause"), 1.0)
    assert changed == a_batch(priority=3, is_paused=True)


async def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "db")
    await store.run(file_rows.insert, a_file())
    await store.run(
        lambda db: db.execute("UPDATE files SET record = json_set(record, '$.created_at_s', 'x')")
    )
    with pytest.raises(StorageError, match=r"Expected `float`, got `str` - at `\$.created_at_s`"):
        await store.run(file_rows.find, "o", "file-1", 0.0)
    await store.close()


class TestLists:
    async def test_a_list_is_read_beside_a_commit(self, tmp_path: Path) -> None:
        """It is held until the commit is done, which therefore does not wait for the list."""
        held, go_on = threading.Event(), threading.Event()
        used: list[str] = []

        def held_page(connection: sqlite3.Connection) -> list[str]:
            used.append(threading.current_thread().name)
            before = file_page(connection)
            held.set()
            assert go_on.wait(20)
            assert file_page(connection) == before
            return before

        def file_page(connection: sqlite3.Connection) -> list[str]:
            used.append(threading.current_thread().name)
            found = file_rows.page(
                connection, "o", 0.0, after=None, limit=9, is_ascending=True, purpose=None
            )
            return [file.id for file in found]

        def add(connection: sqlite3.Connection) -> None:
            used.append(threading.current_thread().name)
            file_rows.insert(connection, a_file("file-2"))

        store = await Store.open(tmp_path / "db")
        await store.run(file_rows.insert, a_file())
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            page = tasks.create_task(store.lists.run(held_page))
            await asyncio.to_thread(held.wait, 20)
            try:
                await store.run(add)
                assert await store.run(file_rows.exists, "file-2")
            finally:
                go_on.set()
        assert page.result() == ["file-1"]
        assert await store.lists.run(file_page) == ["file-1", "file-2"]
        assert set(used) == {"coserve-store_0", "coserve-lists_0"}
        await store.close()

    async def test_a_list_changes_nothing(self, tmp_path: Path) -> None:
        store = await Store.open(tmp_path / "db")
        with pytest.raises(StorageError, match="readonly"):
            await store.lists.run(file_rows.insert, a_file())
        assert not await store.run(file_rows.exists, "file-1")
        await store.close()

    def test_a_page_has_a_bound_whatever_is_asked(self, connection: sqlite3.Connection) -> None:
        """And one more row, which says that the list goes on."""
        limits = BatchLimits(max_active_batches=10_000, max_active_batches_per_owner=10_000)
        file_rows.insert(connection, a_file())
        connection.execute("BEGIN")  # So that not each row is forced to the disk.
        for number in range(2, MOST_ROWS + 100):
            file_rows.insert(connection, a_file(f"file-{number}"))
            batch_rows.create(connection, a_batch(id=f"batch_{number}"), limits, FREE_BYTES)
        files = file_rows.page(
            connection, "o", 0.0, after=None, limit=10**9, is_ascending=False, purpose=None
        )
        batches = batch_rows.page(connection, "o", after=None, limit=10**9)
        assert (len(files), len(batches)) == (MOST_ROWS + 1, MOST_ROWS + 1)
        assert len(batch_rows.page(connection, None, after="batch_5", limit=10**9)) == 3


def test_progress_moves_with_its_files(connection: sqlite3.Connection) -> None:
    file_rows.insert(connection, a_file())
    batch = a_batch(output_expires_after_s=3600.0)
    batch_rows.create(connection, batch, BatchLimits(), FREE_BYTES)
    batch_rows.apply(connection, batch.id, Validated(2, 20), 1.0)
    for file_id in (batch.output_file_id, batch.error_file_id):
        assert not file_rows.exists(connection, file_id)
    half = Progress(completed=1, output_bytes=50, usage=Usage(1, 2, 3, 4), estimated_tokens=10)
    batch_rows.apply(connection, batch.id, Progressed(half), 2.0)
    output = file_rows.find(connection, "o", batch.output_file_id, 2.0)
    assert (output.size_bytes, output.purpose, output.expires_at_s) == (50, "batch_output", None)
    assert not file_rows.exists(connection, batch.error_file_id)
    whole = replace(half, failed=1, error_bytes=70)
    batch_rows.apply(connection, batch.id, Progressed(whole), 3.0)
    batch_rows.apply(connection, batch.id, LinesFinished(), 4.0)
    done = batch_rows.apply(connection, batch.id, Finalized(), 5.0, outbox_id="evt_1")
    assert done.progress == whole
    assert file_rows.find(connection, "o", batch.output_file_id, 5.0).expires_at_s == 3605.0
    assert file_rows.find(connection, "o", batch.error_file_id, 5.0).size_bytes == 70
    (event,) = batch_rows.due_events(connection, 5.0, 10)
    assert (event.type, event.batch_id) == ("batch.completed", batch.id)


def test_responses_whose_time_is_over_go_and_others_stay(connection: sqlite3.Connection) -> None:
    limits = BatchLimits(max_active_responses=3000)
    connection.execute("BEGIN")  # So that not each row is forced to the disk.
    file_rows.insert(connection, a_file(purpose="response"))
    for number in range(1003):
        response = a_batch(id=f"batch_{number}", response={}, created_at_s=float(number))
        batch_rows.create(connection, response, limits, FREE_BYTES)
    for number in range(1, 1003):
        batch_rows.apply(
            connection, f"batch_{number}", Failed(()), 1002.0 if number == 1002 else 1.0
        )
    assert batch_rows.delete_old(connection, 1001.0, 2000.0, are_responses=True)
    assert not batch_rows.delete_old(connection, 1001.0, 2000.0, are_responses=True)
    rows = connection.execute("SELECT id FROM batches ORDER BY seq").fetchall()
    assert rows == [("batch_0",), ("batch_1002",)]


def test_an_event_in_an_unexpected_state_does_nothing(connection: sqlite3.Connection) -> None:
    file_rows.insert(connection, a_file())
    batch_rows.create(connection, a_batch(), BatchLimits(), FREE_BYTES)
    cancelling = batch_rows.apply(connection, "batch_1", Asked("cancel"), 1.0, owner="o")
    late = Validated(1, 1)
    expected = Status.VALIDATING
    assert batch_rows.apply(connection, "batch_1", late, 2.0, expected=expected) == cancelling


def test_what_a_batch_cannot_be_made_of(connection: sqlite3.Connection) -> None:
    batch = a_batch()
    with pytest.raises(NotFoundError, match="file-1"):
        batch_rows.create(connection, batch, BatchLimits(), FREE_BYTES)
    file_rows.insert(connection, a_file(owner="somebody else"))
    with pytest.raises(NotFoundError):
        batch_rows.create(connection, batch, BatchLimits(), FREE_BYTES)
    file_rows.insert(connection, a_file("file-x", expires_at_s=10.0))
    with pytest.raises(NotFoundError):
        batch = a_batch(input_file_id="file-x", created_at_s=10.0)
        batch_rows.create(connection, batch, BatchLimits(), FREE_BYTES)
    file_rows.insert(connection, a_file("file-y", purpose="batch_output"))
    with pytest.raises(ApiError, match="purpose"):
        batch_rows.create(connection, a_batch(input_file_id="file-y"), BatchLimits(), FREE_BYTES)


class TestOpening:
    def test_a_damaged_database_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "db"
        connection = open_database(path)
        for number in range(200):
            file_rows.insert(connection, a_file(f"file-{number}"))
        connection.close()
        content = bytearray(path.read_bytes())
        for page in range(1, len(content) // 4096):
            content[page * 4096 : page * 4096 + 200] = b"\xff" * 200
        path.write_bytes(content)
        with pytest.raises(StartupError, match=r"cannot use .*db: .*restore it, move it away"):
            open_database(path)
        assert path.read_bytes() == content

    @pytest.mark.parametrize("content", [b"not a database at all" * 300, b"SQLite format 3\0abc"])
    def test_another_file_is_refused(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "db").write_bytes(content)
        with pytest.raises(StartupError, match="cannot use the batch database"):
            open_database(tmp_path / "db")

    def test_the_database_of_another_program_is_refused(self, tmp_path: Path) -> None:
        other = sqlite3.connect(tmp_path / "db")
        other.execute("CREATE TABLE users (name TEXT)")
        other.close()
        with pytest.raises(StartupError, match="another program"):
            open_database(tmp_path / "db")

    @pytest.mark.parametrize(
        ("layout", "writer"), [(LAYOUT - 1, r"0\.1\.0"), (LAYOUT + 1, "of a later version")]
    )
    def test_another_layout_is_refused_and_left_alone(
        self, tmp_path: Path, layout: int, writer: str
    ) -> None:
        path = tmp_path / "db"
        connection = open_database(path)
        connection.execute(f"PRAGMA user_version = {layout}")
        connection.close()
        content = path.read_bytes()
        expected = f"{writer}.* wrote it .*layout {layout}, .*finish its batches with that version"
        with pytest.raises(StartupError, match=expected):
            open_database(path)
        assert path.read_bytes() == content

    def test_a_directory_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(StartupError, match="unable to open"):
            open_database(tmp_path / "gone" / "db")
