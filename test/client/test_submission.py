"""The batch of an output is found again."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from sglang_coserve.client.server_batch import Submission, SubmissionFile, submission_path
from sglang_coserve.errors import InputFileError

FIRST = Submission("digest", "key", input_file_id="file-1")
SECOND = Submission("digest", "key", input_file_id="file-1", batch_id="batch_1")


def load(output: Path, *saved: Submission) -> Submission:
    file = SubmissionFile(output)
    try:
        found = file.load("digest")
        for each in saved:
            file.save(each)
        return found
    finally:
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

    file = SubmissionFile(output)
    assert file.load("digest") == FIRST
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(InputFileError, match="Input/output error"):
        file.save(SECOND)
    file.close()
    monkeypatch.undo()
    assert load(output) == FIRST


@pytest.mark.parametrize("content", [b"something of mine", b"\0\0\0 mp4", b"[]", b"\n{}\n"])
def test_what_is_no_submission_is_kept(tmp_path: Path, content: bytes) -> None:
    output = tmp_path / "out.jsonl"
    submission_path(output).write_bytes(content)
    with pytest.raises(InputFileError, match="remove it"):
        load(output)
    assert submission_path(output).read_bytes() == content
