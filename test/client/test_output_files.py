"""The files of an output: locked, appended to, and whole again after a crash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.client.output_files import check_files, cut_unsynced, errors_path, locked
from sglang_coserve.durable_files import MAX_UNSYNCED_BYTES, lock_file, unlock_file
from sglang_coserve.errors import InputFileError
from sglang_coserve.lines.backend import LineResult
from sglang_coserve.lines.result_record import batch_tag, encode_record

BATCH = "batch_" + "ab" * 12


def record(line: int, batch_id: str = BATCH) -> bytes:
    return encode_record(batch_tag(batch_id), line, "x", LineResult(200, "r", {"text": "naïve\n"}))


CONTENT = b"".join(map(record, range(1, 40)))


def test_two_clients_cannot_write_the_same_output(output: Path) -> None:
    with locked(output), pytest.raises(InputFileError, match="being written by another client"):
        locked(output).__enter__()
    with locked(output):
        pass


def test_outputs_that_cannot_be_files(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"cannot write .*No such file"):
        locked(tmp_path / "missing" / "out.jsonl").__enter__()
    (source := tmp_path / "in.jsonl").touch()
    for special in (tmp_path, Path("/dev/null")):
        with pytest.raises(InputFileError, match="not a regular file"):
            check_files(source, special)


@given(
    fetched=st.integers(0, len(CONTENT)),
    synced=st.integers(0, len(CONTENT)),
    are_zeros=st.booleans(),
)
def test_what_a_power_failure_leaves_is_cut_off(
    tmp_path_factory: pytest.TempPathFactory, fetched: int, synced: int, are_zeros: bool
) -> None:
    """Bytes that were not synced may be zeros."""
    output = tmp_path_factory.mktemp("files") / "out.jsonl"
    kept, lost = CONTENT[: min(synced, fetched)], CONTENT[synced:fetched]
    output.write_bytes(kept + (bytes(len(lost)) if are_zeros else lost))
    cut_unsynced(BATCH, output)
    assert CONTENT.startswith(output.read_bytes())


def test_only_what_may_be_damaged_is_cut_off(output: Path) -> None:
    size_bytes = 3 * MAX_UNSYNCED_BYTES
    content = (CONTENT * (1 + size_bytes // len(CONTENT)))[:size_bytes]
    output.write_bytes(content)
    cut_unsynced(BATCH, output)
    assert output.read_bytes() == content[:-MAX_UNSYNCED_BYTES]


@pytest.mark.parametrize(
    "content", [b"my notes", b'{"id":"x"}\n', b"\n", b"[\0", record(1, "batch_" + "cd" * 12)]
)
@pytest.mark.parametrize("which", ["output", "errors"])
def test_a_file_that_is_not_ours_is_refused_and_kept(
    output: Path, content: bytes, which: str
) -> None:
    path = output if which == "output" else errors_path(output)
    path.write_bytes(content)
    with pytest.raises(InputFileError, match="something else than results of"):
        cut_unsynced(BATCH, output)
    assert path.read_bytes() == content


def test_a_copy_in_a_process_that_is_being_started_holds_no_lock(tmp_path: Path) -> None:
    held = lock_file(tmp_path / "lock", 0o600)
    copy = os.dup(held)
    try:
        unlock_file(held)
        unlock_file(lock_file(tmp_path / "lock", 0o600))
    finally:
        os.close(copy)
