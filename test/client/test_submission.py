"""The batch of an output is found again wherever a crash has cut its submission."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.client.submission import Submission, SubmissionFile, submission_path
from sglang_coserve.errors import InputFileError

FIRST = Submission("digest", "key", input_file_id="file-1")
SECOND = Submission("digest", "key", input_file_id="file-1", batch_id="batch_1")


def load(output: Path, *saved: Submission) -> Submission:
    file = SubmissionFile(output)
    file.open()
    try:
        found = file.load("digest")
        for each in saved:
            file.save(each)
        return found
    finally:
        file.close()


@given(data=st.data())
def test_a_torn_submission_is_the_one_before(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    output = tmp_path_factory.mktemp("submission") / "out.jsonl"
    path = submission_path(output)
    load(output, FIRST)
    first = path.read_bytes()
    load(output, SECOND)
    whole = path.read_bytes()
    synced = data.draw(st.sampled_from((b"", first, whole)), label="synced")
    size_bytes = data.draw(st.integers(len(synced), len(whole)), label="size")
    at = data.draw(st.integers(len(synced), size_bytes), label="zeros from")
    zeros = data.draw(st.integers(0, size_bytes - at), label="zeros")
    path.write_bytes(whole[:at] + bytes(zeros) + whole[at + zeros : size_bytes])

    found = load(output, SECOND)

    if synced == whole:
        assert found == SECOND
    elif synced == first:
        assert found in (FIRST, SECOND)
    else:
        assert found in (FIRST, SECOND) or found.input_file_id is None
    assert load(output) == SECOND


def test_a_submission_of_an_older_version_goes_on(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    older = {"input_digest": "digest", "idempotency_key": "key", "input_file_id": "file-1"}
    submission_path(output).write_text(json.dumps({**older, "batch_id": None}))
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
    file.open()
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
