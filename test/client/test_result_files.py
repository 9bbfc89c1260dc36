"""The files of a run, through crashes: the records are the only journal."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batch.scenarios import line
from client.batch_files import results_by_line, write_lines
from sglang_coserve.client.output_files import (
    BatchResult,
    LineError,
    Response,
    ResultFiles,
    errors_path,
)
from sglang_coserve.durable_files import lock_file, unlock_file
from sglang_coserve.errors import InputFileError, StorageError
from sglang_coserve.jsonl.lines import read_lines
from sglang_coserve.lines.backend import LineResult
from sglang_coserve.lines.result_record import Progress, encode_record

MAX_LINE_BYTES = 10_000


def served(number: int) -> BatchResult:
    return BatchResult(number, f"id-{number}", Response(200, "r", {"text": "naïve\n" * 3}))


def failed(number: int) -> BatchResult:
    return BatchResult(number, f"id-{number}", error=LineError("invalid_url", "no such url"))


def open_files(output: Path, source: Path, *, retry_failed: bool = False) -> ResultFiles:
    files = ResultFiles(output)
    files.open(source, MAX_LINE_BYTES, retry_failed=retry_failed)
    return files


def digests(source: Path) -> dict[int, int]:
    with source.open("rb") as file:
        lines = read_lines(file, MAX_LINE_BYTES, with_digest=True)
        return {each.number: each.digest for each in lines}


def record_of(result: BatchResult, digest: int) -> bytes:
    answer = LineResult.unserved("invalid_url", "no such url")
    if result.response:
        answer = LineResult(200, result.response.request_id, result.response.body)
    return encode_record(digest, result.line, result.custom_id, answer)


def append(files: ResultFiles, result: BatchResult, digest: int) -> None:
    """Write the record of one line, as a run does."""
    record, now = record_of(result, digest), files.log.progress
    if result.ok:
        files.log.append(record, b"", now + Progress(completed=1, output_bytes=len(record)))
    else:
        files.log.append(b"", record, now + Progress(failed=1, error_bytes=len(record)))
    files.finished.add(digest, result.line)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [line(f"id-{n}") for n in range(1, 6)])


def write_all(output: Path, source: Path) -> None:
    """Finish every line, the even ones badly."""
    files = open_files(output, source)
    for number, digest in digests(source).items():
        append(files, failed(number) if number % 2 == 0 else served(number), digest)
    files.close()


def test_two_clients_cannot_write_the_same_output(output: Path, source: Path) -> None:
    files = open_files(output, source)
    with pytest.raises(InputFileError, match="being written by another client"):
        open_files(output, source)
    files.close()
    open_files(output, source).close()


def test_lines_may_be_added_and_unfinished_ones_changed(output: Path, source: Path) -> None:
    files = open_files(output, source)
    append(files, served(1), digests(source)[1])
    files.close()
    write_lines(source, [line("id-1"), line("other"), line("more")])
    files = open_files(output, source)
    assert [number in files.finished for number in (1, 2, 3)] == [True, False, False]
    files.close()


def test_a_failed_line_may_be_mended_and_retried(output: Path, source: Path) -> None:
    write_all(output, source)
    lines = source.read_text().splitlines()
    write_lines(source, [lines[0], line("mended"), *lines[2:]])
    with pytest.raises(InputFileError, match="line 2 of the input has changed"):
        open_files(output, source)
    open_files(output, source, retry_failed=True).close()


@pytest.mark.parametrize(
    ("new_lines", "message"),
    [
        ([line("id-1"), line("id-2"), line("CHANGED")], "line 3 of the input has changed"),
        ([line("id-1"), line("id-2")], "result for line 5, but the input ends at line 2"),
        ([], "result for line 1, which the input does not have"),
    ],
)
def test_another_input_is_refused_and_nothing_is_touched(
    output: Path, source: Path, new_lines: list[str], message: str
) -> None:
    write_all(output, source)
    torn = output.read_bytes() + b'{"id":"batch_r'
    output.write_bytes(torn)
    write_lines(source, new_lines)
    for retry_failed in (False, True):
        with pytest.raises(InputFileError, match=message):
            open_files(output, source, retry_failed=retry_failed)
    assert output.read_bytes() == torn
    assert errors_path(output).read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b'{"id":"x"}\n', b"\n", b"[\0"])
@pytest.mark.parametrize("which", ["output", "errors"])
def test_a_file_that_is_not_ours_is_refused_and_kept(
    output: Path, source: Path, content: bytes, which: str
) -> None:
    path = output if which == "output" else errors_path(output)
    path.write_bytes(content)
    for retry_failed in (False, True):
        with pytest.raises(InputFileError, match=r"line 1 of .* is not a batch result"):
            open_files(output, source, retry_failed=retry_failed)
    assert path.read_bytes() == content


def test_the_input_is_never_the_output(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="would overwrite the input"):
        open_files(source, source)
    as_errors = tmp_path / "x.errors.jsonl"
    as_errors.hardlink_to(source)
    with pytest.raises(InputFileError, match="would overwrite the input"):
        open_files(tmp_path / "x.jsonl", source)


def test_outputs_that_cannot_be_files(tmp_path: Path, source: Path) -> None:
    with pytest.raises(InputFileError, match=r"cannot write .*No such file"):
        open_files(tmp_path / "missing" / "out.jsonl", source)
    for special in (tmp_path, Path("/dev/null")):
        with pytest.raises(InputFileError, match="not a regular file"):
            open_files(special, source)


def test_a_full_disk_leaves_no_torn_record(output: Path, source: Path) -> None:
    files = open_files(output, source)
    append(files, served(1), digests(source)[1])
    # A file size limit stands in for a full disk: part of the record still fits.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (output.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"out.jsonl cannot be written: File too large"):
            append(files, served(2), digests(source)[2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    files.close()
    assert output.read_bytes().endswith(b"\n")
    assert list(results_by_line(output)) == [1]


class CrashingRun(RuleBasedStateMachine):
    """A run that is killed while it writes, continued, and killed again."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        folder = Path(self.directory.name)
        self.source = write_lines(folder / "in.jsonl", [line(f"id-{n}") for n in range(1, 31)])
        self.digests = digests(self.source)
        self.output = folder / "out.jsonl"
        self.files = open_files(self.output, self.source)
        self.expected: dict[int, BatchResult] = {}

    def teardown(self) -> None:
        self.files.close()
        self.directory.cleanup()

    @property
    def unfinished(self) -> list[int]:
        return [number for number in self.digests if number not in self.expected]

    @precondition(lambda self: self.unfinished)
    @rule(ok=st.booleans(), data=st.data())
    def finish_a_line(self, ok: bool, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.unfinished))
        result = served(number) if ok else failed(number)
        append(self.files, result, self.digests[number])
        self.expected[number] = result

    @precondition(lambda self: self.unfinished)
    @rule(ok=st.booleans(), cut=st.floats(0, 1, exclude_max=True), data=st.data())
    def be_killed_in_the_middle_of_a_record(
        self, ok: bool, cut: float, data: st.DataObject
    ) -> None:
        number = data.draw(st.sampled_from(self.unfinished))
        result = served(number) if ok else failed(number)
        record = record_of(result, self.digests[number])
        self.files.close()
        with (self.output if ok else errors_path(self.output)).open("ab") as file:
            file.write(record[: int(cut * len(record))])
        self.files = open_files(self.output, self.source)

    @rule()
    def be_killed_between_records(self) -> None:
        self.files.close()
        self.files = open_files(self.output, self.source)

    @rule()
    def retry_what_failed(self) -> None:
        self.files.close()
        self.files = open_files(self.output, self.source, retry_failed=True)
        self.expected = {number: each for number, each in self.expected.items() if each.ok}

    @invariant()
    def every_finished_line_has_exactly_its_record(self) -> None:
        assert results_by_line(self.output) == self.expected
        assert self.files.log.progress.lines == len(self.expected)
        assert all(number in self.files.finished for number in self.expected)


TestCrashingRun = CrashingRun.TestCase
TestCrashingRun.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_copy_in_a_process_that_is_being_started_holds_no_lock(tmp_path: Path) -> None:
    held = lock_file(tmp_path / "lock", 0o600)
    copy = os.dup(held)
    try:
        unlock_file(held)
        unlock_file(lock_file(tmp_path / "lock", 0o600))
    finally:
        os.close(copy)
