"""Reading an input line by line, whatever is in it, and which lines become requests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_coserve.client.line_server import offline_body
from sglang_coserve.client.local_batch import LineChecker
from sglang_coserve.client.output_files import open_input
from sglang_coserve.errors import InputFileError
from sglang_coserve.jsonl.lines import FileLine, read_lines
from sglang_coserve.jsonl.request_line import RequestLine
from sglang_coserve.lines.line_run import UnservedLine


def read(path: Path, max_line_bytes: int = 1000) -> list[FileLine]:
    with open_input(path) as file:
        return list(read_lines(file, max_line_bytes, with_digest=True))


def contents(path: Path, max_line_bytes: int = 1000) -> list[bytes | None]:
    return [line.content for line in read(path, max_line_bytes)]


def test_a_line_is_the_same_line_with_any_ending(tmp_path: Path) -> None:
    digests = []
    for data in (b"one\ntwo", b"one\r\ntwo\r\n", b"\xef\xbb\xbfone\ntwo\n"):
        path = tmp_path / "in.jsonl"
        path.write_bytes(data)
        digests.append([line.digest for line in read(path)])
    assert digests[0] == digests[1] == digests[2]


def test_a_line_at_the_limit_is_read_and_a_longer_one_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    long = b"x" * (3 << 20)
    path.write_bytes(b"a" * 10 + b"\n" + b"b" * 11 + b"\n" + long + b"\nend\n" + b"c" * 11)
    assert contents(path, 10) == [b"a" * 10, None, None, b"end", None]
    assert sum(line.size_bytes for line in read(path, 10)) == path.stat().st_size


def test_a_skipped_line_still_has_a_digest_of_all_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * (2 << 20) + b"1\n")
    (before,) = read(path, 10)
    path.write_bytes(b"x" * (2 << 20) + b"2\n")
    (after,) = read(path, 10)
    assert before.digest != after.digest


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


def test_files_that_cannot_be_a_batch(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"cannot read .*missing.jsonl"):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(InputFileError, match="not a regular file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputFileError, match="not a regular file"):
        read(tmp_path / "pipe")
    (tmp_path / "utf16.jsonl").write_text("{}", encoding="utf-16")
    with pytest.raises(InputFileError, match="save it as UTF-8"):
        read(tmp_path / "utf16.jsonl")


def nothing(_line: int) -> bool:
    return False


def valid(**changes: Any) -> dict[str, Any]:
    fields = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hello"}]},
    }
    return {name: value for name, value in (fields | changes).items() if value is not ...}


def check_all(*contents: bytes | dict[str, Any]) -> list[RequestLine | UnservedLine | None]:
    checker = LineChecker(max_line_bytes=10_000, is_finished=nothing)
    checked: list[RequestLine | UnservedLine | None] = []
    for number, content in enumerate(contents, 1):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        checked.append(checker.check(FileLine(number, 0, len(data), data, 1)))
    checker.close()
    return checked


def error_code(content: bytes | dict[str, Any]) -> str:
    (result,) = check_all(content)
    return code_of(result)


def code_of(checked: RequestLine | UnservedLine | None) -> str:
    assert isinstance(checked, UnservedLine)
    return str(checked.result.body["error"]["code"])


def sent_body(content: dict[str, Any]) -> Any:
    (request,) = check_all(content)
    assert isinstance(request, RequestLine)
    return json.loads(offline_body(request.body))


def test_a_valid_line_is_sent_in_the_offline_class() -> None:
    assert sent_body(valid()) == valid()["body"] | {"service_tier": "flex"}
    assert sent_body(valid(body={"service_tier": None}))["service_tier"] == "flex"


@pytest.mark.parametrize(
    "body", [{"service_tier": "default"}, {"coserve_class": "online"}, {"service_tier": "flex"}]
)
def test_a_line_that_chooses_its_class_keeps_it(body: dict[str, Any]) -> None:
    assert sent_body(valid(body=body)) == body


def test_a_body_is_sent_as_it_was_meant() -> None:
    body = {"text": "naïve 日本 \U0001f600 \u2028", "x": 1.5e-300, "n": 2**70, "deep": [[{}]]}
    assert sent_body(valid(body=body)) == body | {"service_tier": "flex"}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"not json", "invalid_json_line"),
        (valid(method=...), "invalid_request"),
        (valid(url="/v1/models"), "url_mismatch"),
        (valid(url="http://elsewhere/v1/completions"), "url_mismatch"),
        (valid(body={"stream": True}), "stream_not_supported"),
    ],
)
def test_bad_lines(content: bytes | dict[str, Any], code: str) -> None:
    """Others are as bad in a batch's file."""
    assert error_code(content) == code


def test_an_error_names_the_id_when_there_is_one() -> None:
    _, bad_url, bad_json = check_all(valid(), valid(custom_id="b", url="/x"), b"{")
    assert isinstance(bad_url, UnservedLine)
    assert isinstance(bad_json, UnservedLine)
    assert (bad_url.custom_id, bad_json.custom_id) == ("b", None)


def test_a_finished_line_is_passed_over_and_its_id_remembered() -> None:
    checker = LineChecker(max_line_bytes=10_000, is_finished={1}.__contains__)
    data = json.dumps(valid()).encode()
    first, second = (checker.check(FileLine(n, 0, len(data), data, 1)) for n in (1, 2))
    assert first is None
    assert code_of(second) == "duplicate_custom_id"


@settings(deadline=None)
@given(st.lists(st.text(min_size=1).filter(lambda text: text.isprintable()), max_size=40))
def test_exactly_the_first_of_each_id_is_a_request(ids: list[str]) -> None:
    checked = check_all(*(valid(custom_id=each) for each in ids))
    firsts = [ids.index(each) == position for position, each in enumerate(ids)]
    assert [isinstance(line, RequestLine) for line in checked] == firsts
