"""The batch of an output is found again."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_coserve.client.options import BatchOptions
from sglang_coserve.client.output_files import errors_path
from sglang_coserve.client.submission import (
    Submission,
    SubmissionFile,
    data_directory,
    submission_path,
)
from sglang_coserve.errors import ConfigError, InputFileError

FIRST = Submission("digest", "key", input_file_id="file-1")
SECOND = replace(FIRST, batch_id="batch_1")
OPTIONS = BatchOptions()
LOCAL = replace(SECOND, is_local=True)
ENDED = replace(LOCAL, ended={"request_counts": {"completed": 1, "failed": 0}})


def load(
    output: Path, *saved: Submission, is_local: bool = False, options: BatchOptions = OPTIONS
) -> Submission:
    file = SubmissionFile(output)
    try:
        found = file.load("digest", options, is_local=is_local)
        for each in saved:
            file.save(each)
        return found
    finally:
        file.close()


def save(output: Path, submission: Submission) -> None:
    file = SubmissionFile(output)
    file.save(submission)
    file.close()


def test_a_submission_of_an_older_version_goes_on(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    older = {"input_digest": "digest", "idempotency_key": "key", "input_file_id": "file-1"}
    lines = (json.dumps({**older, "input_file_id": None}), json.dumps({**older, "batch_id": None}))
    submission_path(output).write_text("\n".join(lines))
    assert load(output, SECOND) == FIRST
    assert load(output) == SECOND


def test_a_submission_that_cannot_be_synced_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    load(output, FIRST)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(InputFileError, match="Input/output error"):
            load(output, SECOND)
    assert load(output) == FIRST


@pytest.mark.parametrize("content", [b"something of mine", b"\0\0\0 mp4", b"[]", b"\n{}\n"])
def test_what_is_no_submission_is_kept(tmp_path: Path, content: bytes) -> None:
    output = tmp_path / "out.jsonl"
    submission_path(output).write_bytes(content)
    with pytest.raises(InputFileError, match="remove it"):
        load(output)
    assert submission_path(output).read_bytes() == content


@pytest.mark.parametrize("path_of", [lambda output: output, errors_path])
def test_results_of_no_known_batch_are_kept(output: Path, path_of: Callable[[Path], Path]) -> None:
    """As an earlier version left them that sent lines one by one."""
    path_of(output).write_text("{}\n")
    for is_local in (False, True):
        with pytest.raises(InputFileError, match="is not empty, and no batch is known"):
            load(output, is_local=is_local)
    assert path_of(output).read_text() == "{}\n"
    assert not submission_path(output).exists()


def test_a_batch_stays_where_it_was_begun(output: Path) -> None:
    save(output, SECOND)
    with pytest.raises(ConfigError, match="kept by the server"):
        load(output, is_local=True)
    data_directory(output).mkdir()
    save(output, LOCAL)
    with pytest.raises(ConfigError, match=r"kept by this client \(--no-batch\)"):
        load(output)
    assert load(output, is_local=True) == LOCAL


def test_an_ended_batch_needs_nothing_but_its_results(output: Path) -> None:
    save(output, ENDED)
    output.write_text("a result\n")
    assert load(output, is_local=True) == ENDED
    output.unlink()
    begun = load(output, is_local=True)
    assert (begun.ended, begun.batch_id) == (None, None)
    save(output, replace(ENDED, is_local=False))  # The server may still have the results.
    assert load(output) == SECOND


def test_a_new_batch_begins_with_an_empty_directory(output: Path) -> None:
    directory = data_directory(output)
    directory.mkdir()
    (directory / "lock").touch()
    begun = load(output, is_local=True)
    assert not directory.exists()
    assert json.loads(submission_path(output).read_text())["is_local"]
    directory.mkdir()
    assert load(output, is_local=True) == begun
    submission_path(output).unlink()
    (directory / "notes").touch()
    with pytest.raises(InputFileError, match="is not from coserve submit"):
        load(output, is_local=True)
    assert (directory / "notes").exists()


@pytest.mark.parametrize("is_local", [False, True])
def test_other_options_are_refused(output: Path, is_local: bool) -> None:
    begun = replace(SECOND, is_local=is_local, batch_options=BatchOptions("2h", 1))
    save(output, begun)
    data_directory(output).mkdir()
    for other in (BatchOptions("3h", 1), BatchOptions("2h"), BatchOptions(priority=1)):
        with pytest.raises(ConfigError, match=r"begun with the window 2h and .*: give the same"):
            load(output, is_local=is_local, options=other)
    assert load(output, is_local=is_local, options=BatchOptions("2h", 1)) == begun


def test_a_directory_that_cannot_be_removed_is_told(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch would go on."""
    directory = data_directory(output)
    directory.mkdir()
    (directory / "lock").touch()

    def fail(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(InputFileError, match="cannot remove"):
            load(output, is_local=True)
    assert not submission_path(output).exists()
