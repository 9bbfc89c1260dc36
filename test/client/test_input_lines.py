"""Reading an input line by line, whatever is in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_coserve.jsonl.lines import FileLine, read_lines


def read(path: Path, max_line_bytes: int = 1000) -> list[FileLine]:
    with path.open("rb") as file:
        return list(read_lines(file, max_line_bytes))


def contents(path: Path, max_line_bytes: int = 1000) -> list[bytes | None]:
    return [line.content for line in read(path, max_line_bytes)]


def test_a_line_is_the_same_line_with_any_ending(tmp_path: Path) -> None:
    for data in (b"one\ntwo", b"one\r\ntwo\r\n", b"\xef\xbb\xbfone\ntwo\n"):
        path = tmp_path / "in.jsonl"
        path.write_bytes(data)
        assert contents(path) == [b"one", b"two"]


def test_a_line_at_the_limit_is_read_and_a_longer_one_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    long = b"x" * (3 << 20)
    path.write_bytes(b"a" * 10 + b"\n" + b"b" * 11 + b"\n" + long + b"\nend\n" + b"c" * 11)
    assert contents(path, 10) == [b"a" * 10, None, None, b"end", None]
    assert sum(line.size_bytes for line in read(path, 10)) == path.stat().st_size


@settings(deadline=None)
@given(
    lines=st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b""))),
    max_line_bytes=st.integers(1, 30),
)
def test_no_byte_is_lost_and_no_line_is_longer_than_allowed(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], max_line_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "in.jsonl"
    # A first line that is read as it is: a generated one may be a byte order mark.
    lines = [b"{", *lines]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    expected = [line if len(line) <= max_line_bytes else None for line in lines]
    assert contents(path, max_line_bytes) == expected
