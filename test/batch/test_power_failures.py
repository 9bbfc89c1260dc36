"""What counts as written is there after a power failure between any two steps."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch.power_failure import PowerFailure
from batch.test_result_log import TAG, record, unserved
from sglang_coserve import durable_files
from sglang_coserve.batch.data_directory import DataDirectory
from sglang_coserve.batch.file_store import FileStore
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.errors import StorageError
from sglang_coserve.lines.result_log import ResultLog
from sglang_coserve.lines.result_record import Progress

STEPS = st.integers(0, 60)
SYNCS = st.frozensets(st.integers(0, 12), max_size=3)
SEEDS = st.integers(0, 2**32)


@contextmanager
def power_failure(
    step: int, failing_syncs: frozenset[int] = frozenset()
) -> Generator[tuple[PowerFailure, Path]]:
    """A disk that fails at a step, and where to put what is left of it."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder, left = Path(name, "disk").resolve(), Path(name, "left")
        folder.mkdir()
        left.mkdir()
        disk = PowerFailure(folder, patch, step, failing_syncs)
        try:
            yield disk, left
        finally:
            patch.undo()
            disk.close()


def recover(folder: Path, committed: Progress) -> tuple[ResultLog, list[int]]:
    log, found = ResultLog(folder / "output", folder / "errors"), []

    def add(tag: int, line: int) -> bool | None:
        found.append(line)
        return tag == TAG

    log.scan(add, committed)
    log.cut()
    return log, found


@settings(max_examples=300)
@given(
    step=STEPS,
    failing_syncs=SYNCS,
    seed=SEEDS,
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5),
)
def test_a_result_that_was_counted_is_never_lost_and_none_is_made_up(
    step: int, failing_syncs: frozenset[int], seed: int, sizes: list[int]
) -> None:
    with power_failure(step, failing_syncs) as (disk, left):
        counted = at_failure = Progress()
        line, log = 0, None
        records: dict[int, bytes] = {}
        for size in sizes:
            for _ in range(8):  # As often as a driver has to try again.
                try:
                    if log is None:
                        log, _ = recover(disk.folder, counted)
                        counted = log.progress
                        at_failure = at_failure if disk.wreck else counted
                    lines = range(line + 1, line + size + 1)
                    line += size
                    output = b"".join(record(each) for each in lines if each % 3)
                    errors = b"".join(unserved(each) for each in lines if not each % 3)
                    for each in lines:
                        records[each] = record(each) if each % 3 else unserved(each)
                    failed = sum(not each % 3 for each in lines)
                    added = Progress(size - failed, failed, len(output), len(errors))
                    log.append(output, errors, log.progress + added)
                    counted = log.progress
                    at_failure = at_failure if disk.wreck else counted
                    break
                except StorageError:
                    log = None
        disk.fail().leave(left, random.Random(seed))
        log, found = recover(left, at_failure)
        assert log.progress.lines == len(found) >= at_failure.lines
        for name in ("output", "errors"):
            content = (left / name).read_bytes() if (left / name).exists() else b""
            for each in content.splitlines(keepends=True):
                assert each in records.values()
        assert len(set(found)) == len(found)


@settings(max_examples=100)
@given(step=STEPS, failing_syncs=SYNCS, seed=SEEDS)
def test_what_was_read_after_a_restart_counts_only_once_it_is_on_the_disk(
    step: int, failing_syncs: frozenset[int], seed: int
) -> None:
    """The process was killed between a write and its sync."""
    with power_failure(step, failing_syncs) as (disk, left):
        (disk.folder / "output").write_bytes(record(1) + record(2) + record(3)[:40])
        counted = None
        for _ in range(4):
            try:
                log, found = recover(disk.folder, Progress())
            except StorageError:
                continue
            if counted is None and disk.wreck is None:
                assert found == [1, 2]
                counted = log.progress
            break
        disk.fail().leave(left, random.Random(seed))
        recover(left, counted or Progress())


@settings(max_examples=100)
@given(step=STEPS, failing_syncs=SYNCS, seed=SEEDS)
def test_a_file_that_is_replaced_is_the_old_one_or_the_new_one(
    step: int, failing_syncs: frozenset[int], seed: int
) -> None:
    versions = [bytes([65 + n]) * 100 * (n + 1) for n in range(4)]
    with power_failure(step, failing_syncs) as (disk, left):
        done = -1
        for number, content in enumerate(versions):
            try:
                durable_files.replace(disk.folder / "file", lambda file, c=content: file.write(c))  # type: ignore[misc]
            except OSError:
                continue
            done = done if disk.wreck else number
        disk.fail().leave(left, random.Random(seed))
        found = (left / "file").read_bytes() if (left / "file").exists() else None
        assert found in versions[max(0, done) :] + ([None] if done < 0 else [])
        durable_files.discard(left / "file")
        assert list(left.iterdir()) == []


@settings(max_examples=150)
@given(step=st.integers(0, 120), failing_syncs=SYNCS, seed=SEEDS)
def test_an_upload_that_was_confirmed_is_whole_and_nothing_else_stays(
    step: int, failing_syncs: frozenset[int], seed: int
) -> None:
    with power_failure(step, failing_syncs) as (disk, left):
        directory = DataDirectory(disk.folder / "data")
        directory.open()
        files = FileStore(
            SimpleNamespace(  # type: ignore[arg-type]
                directory=directory,
                limits=BatchLimits(),
                **dict.fromkeys(("store", "threads")),
            )
        )
        rows: dict[str, bytes] = {}
        at_failure: dict[str, bytes] = {}
        for number in range(4):
            file_id = f"file-{number:024x}"
            content = bytes([65 + number]) * 50
            opened = ExitStack()
            try:
                fd = files._begin(file_id, opened)
                files._append(fd, content)
                files._append(fd, content)
                files._force(fd)
                rows[file_id] = content * 2
                at_failure = at_failure if disk.wreck else dict(rows)
                directory.confirm(file_id)
            except StorageError:
                directory.discard(file_id)
            finally:
                opened.close()
            if number == 2:
                directory.mark_in_doubt(file_id)
                rows.pop(file_id, None)
                at_failure = at_failure if disk.wreck else dict(rows)
                directory.discard(file_id)
        directory.close()
        disk.fail().leave(left, random.Random(seed))
        for name in ("files", "in_doubt"):
            (left / "data" / name).mkdir(parents=True, exist_ok=True)
        DataDirectory(left / "data").settle(at_failure.__contains__)
        found = {path.name: path.read_bytes() for path in (left / "data" / "files").iterdir()}
        assert found == at_failure
