"""Records that were written whole are kept, and nothing else is, wherever a crash cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.errors import StorageError
from sglang_coserve.lines.backend import LineResult
from sglang_coserve.lines.line_source import LineBitmap
from sglang_coserve.lines.result_log import ResultLog
from sglang_coserve.lines.result_record import (
    Progress,
    Usage,
    batch_tag,
    encode_record,
    record_identity,
    usage_of,
)

BATCH = "batch_" + "ab" * 12
TAG = batch_tag(BATCH)


def record(line: int, tokens: int = 5) -> bytes:
    usage = {"prompt_tokens": tokens, "completion_tokens": 1}
    return encode_record(TAG, line, f"id-{line}", LineResult(200, "r", {"usage": usage}))


def unserved(line: int) -> bytes:
    return encode_record(TAG, line, f"id-{line}", LineResult.unserved("batch_expired", "too late"))


def a_log(directory: Path) -> ResultLog:
    return ResultLog(directory / "output", directory / "errors")


def recover(log: ResultLog, committed: Progress, estimate_tokens: int = 0) -> list[int]:
    """Make the files whole; return the lines that have a record."""
    finished = LineBitmap()
    log.scan(
        lambda tag, line: finished.add(line) if tag == TAG else None, committed, estimate_tokens
    )
    log.cut()
    return [line for line in range(1, 10) if line in finished]


@given(data=st.data())
def test_a_file_cut_off_anywhere_keeps_its_whole_records(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("log")
    output = [record(line, tokens=line) for line in range(1, 6)]
    errors = [unserved(line) for line in range(6, 9)]
    counted = data.draw(st.integers(0, 5), label="records that the store counted")
    kept_bytes = len(b"".join(output[:counted]))
    cut = data.draw(st.integers(kept_bytes, len(b"".join(output))), label="cut at byte")
    garbage = data.draw(st.sampled_from([b"", b"\0" * 100, b"\0\n\0\n"]))
    (directory / "output").write_bytes(b"".join(output)[:cut] + garbage)
    (directory / "errors").write_bytes(b"".join(errors))
    committed = Progress(
        completed=counted,
        output_bytes=kept_bytes,
        usage=Usage(input_tokens=sum(range(1, counted + 1)), output_tokens=counted),
    )

    log = a_log(directory)
    finished = recover(log, committed, 10)

    whole = sum(len(b"".join(output[:n])) <= cut for n in range(1, 6))
    assert finished == [*range(1, whole + 1), 6, 7, 8]
    assert log.progress == Progress(
        completed=whole,
        failed=3,
        output_bytes=len(b"".join(output[:whole])),
        error_bytes=len(b"".join(errors)),
        usage=Usage(input_tokens=sum(range(1, whole + 1)), output_tokens=whole),
        estimated_tokens=10 * (whole - counted + 3),
    )
    assert (directory / "output").read_bytes() == b"".join(output[:whole])
    again = a_log(directory)
    recover(again, log.progress, 10)
    assert again.progress == log.progress


def test_no_file_is_made_for_nothing(tmp_path: Path) -> None:
    log = a_log(tmp_path)
    log.append(b"", b"", Progress())
    assert recover(log, Progress()) == []
    assert log.progress == Progress()
    assert not list(tmp_path.iterdir())


def test_results_that_were_counted_and_are_gone_are_no_reason_to_start_over(tmp_path: Path) -> None:
    committed = Progress(completed=2, output_bytes=len(record(1) + record(2)))
    with pytest.raises(StorageError, match="output is gone"):
        recover(a_log(tmp_path), committed)
    damaged = record(1) + record(2).replace(b'{"id"', b'{"ID"')
    (tmp_path / "output").write_bytes(damaged)
    with pytest.raises(StorageError, match="damaged after byte"):
        recover(a_log(tmp_path), committed)
    assert (tmp_path / "output").read_bytes() == damaged


def test_a_line_with_two_records_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "output").write_bytes(record(1))
    (tmp_path / "errors").write_bytes(unserved(1))
    with pytest.raises(StorageError, match="second result for line 1"):
        recover(a_log(tmp_path), Progress())


def test_a_full_disk_is_named() -> None:
    log = ResultLog(Path("/dev/full"), Path("/dev/full"))
    with pytest.raises(StorageError, match="No space left on device"):
        log.append(record(1), b"", Progress())


@pytest.mark.parametrize(
    "not_ours",
    [
        b"",
        b"{}\n",
        record(1).rstrip(),
        record(1).replace(b"ab", b"xy"),
        record(1).replace(b"_1", b"_0"),
        record(1).replace(b"_1", b"_" + b"9" * 30),
        b" " + record(1),
    ],
)
def test_what_is_no_record(not_ours: bytes) -> None:
    assert record_identity(record(1)) == (TAG, 1)
    assert record_identity(not_ours) is None


def test_records_of_another_batch_are_cut_off(tmp_path: Path) -> None:
    (tmp_path / "output").write_bytes(record(1) + record(2).replace(b"ab", b"cd") + record(3))
    assert recover(a_log(tmp_path), Progress()) == [1]
    assert (tmp_path / "output").read_bytes() == record(1)


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        (
            {
                "prompt_tokens": 5,
                "completion_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 2},
                "completion_tokens_details": {"reasoning_tokens": 3},
            },
            Usage(5, 2, 7, 3),
        ),
        (
            {
                "input_tokens": 5,
                "output_tokens": 7,
                "input_tokens_details": {"cached_tokens": 2},
                "output_tokens_details": {"reasoning_tokens": 3},
            },
            Usage(5, 2, 7, 3),
        ),
        ({"prompt_tokens": 5, "total_tokens": 5, "prompt_tokens_details": None}, Usage(5)),
        ({"prompt_tokens": True, "completion_tokens": -1}, Usage()),
        ("many", Usage()),
        (None, Usage()),
    ],
)
def test_every_api_counts_its_tokens_its_own_way(usage: object, counted: Usage) -> None:
    assert usage_of({"usage": usage}) == counted
