"""Which lines become requests, and what the others are told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_coserve.client.line_server import offline_body
from sglang_coserve.client.local_batch import LineChecker
from sglang_coserve.jsonl.request_line import RequestLine
from sglang_coserve.lines.line_run import UnservedLine
from sglang_coserve.lines.line_source import InputLine


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
        checked.append(checker.check(InputLine(number, 0, len(data), data, 1)))
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


def test_embeddings_are_marked_too() -> None:
    body = {"input": "x", "service_tier": "flex"}
    assert sent_body(valid(url="/v1/embeddings", body={"input": "x"})) == body


def test_a_body_is_sent_as_it_was_meant() -> None:
    body = {"text": "naïve 日本 \U0001f600 \u2028", "x": 1.5e-300, "n": 2**70, "deep": [[{}]]}
    assert sent_body(valid(body=body)) == body | {"service_tier": "flex"}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"not json", "invalid_json"),
        (b'{"custom_id": "a"', "invalid_json"),
        (b"[" * 5000, "invalid_json"),
        (b'{"custom_id": "\xff"}', "invalid_utf8"),
        (b'"text"', "invalid_line"),
        (b"[]", "invalid_line"),
        (b"null", "invalid_line"),
        (valid(custom_id=...), "missing_field"),
        (valid(method=...), "missing_field"),
        (valid(url=...), "missing_field"),
        (valid(body=...), "missing_field"),
        (valid(custom_id=7), "invalid_custom_id"),
        (valid(custom_id=""), "invalid_custom_id"),
        (valid(method="GET"), "invalid_method"),
        (valid(url="/v1/models"), "invalid_url"),
        (valid(url="http://elsewhere/v1/completions"), "invalid_url"),
        (valid(body=[]), "invalid_body"),
        (valid(body="{}"), "invalid_body"),
        (valid(body={"stream": True}), "stream_not_supported"),
        (json.dumps(valid()).replace('"hello"', "NaN").encode(), "invalid_json"),
        (json.dumps(valid()).replace('"hello"', "1e999").encode(), "invalid_json"),
    ],
)
def test_bad_lines(content: bytes | dict[str, Any], code: str) -> None:
    assert error_code(content) == code


def test_a_line_that_was_too_long_to_keep() -> None:
    checker = LineChecker(max_line_bytes=10, is_finished=nothing)
    refused = checker.check(InputLine(3, 0, 1_000_000, None, 1))
    assert code_of(refused) == "line_too_long"
    assert isinstance(refused, UnservedLine)
    assert "1000000 bytes" in refused.result.body["error"]["message"]


def test_an_error_names_the_id_when_there_is_one() -> None:
    _, bad_url, bad_json = check_all(valid(), valid(custom_id="b", url="/x"), b"{")
    assert isinstance(bad_url, UnservedLine)
    assert isinstance(bad_json, UnservedLine)
    assert (bad_url.custom_id, bad_json.custom_id) == ("b", None)


def test_a_finished_line_is_passed_over_and_its_id_remembered() -> None:
    checker = LineChecker(max_line_bytes=10_000, is_finished={1}.__contains__)
    data = json.dumps(valid()).encode()
    first, second = (checker.check(InputLine(n, 0, len(data), data, 1)) for n in (1, 2))
    assert first is None
    assert code_of(second) == "duplicate_custom_id"


def test_what_an_order_knows_of_ids_is_taken_from_it() -> None:
    checker = LineChecker(max_line_bytes=10_000, is_finished=nothing)
    data = json.dumps(valid()).encode()
    left_out = checker.check(InputLine(9, 0, len(data), data, 1, is_first=False))
    first = checker.check(InputLine(3, 0, len(data), data, 1, is_first=True))
    assert code_of(left_out) == "duplicate_custom_id"
    assert isinstance(first, RequestLine)


def test_every_later_line_with_the_same_id_is_a_duplicate() -> None:
    checked = check_all(
        valid(custom_id="a", url="/bad"), valid(custom_id="a"), valid(custom_id="b"), valid()
    )
    codes = [code_of(line) for line in checked if isinstance(line, UnservedLine)]
    assert codes == ["invalid_url", "duplicate_custom_id", "duplicate_custom_id"]
    assert isinstance(checked[2], RequestLine)


@settings(deadline=None)
@given(st.lists(st.text(min_size=1).filter(lambda text: text.isprintable()), max_size=40))
def test_exactly_the_first_of_each_id_is_a_request(ids: list[str]) -> None:
    checked = check_all(*(valid(custom_id=each) for each in ids))
    firsts = [ids.index(each) == position for position, each in enumerate(ids)]
    assert [isinstance(line, RequestLine) for line in checked] == firsts


@settings(deadline=None)
@given(st.binary())
def test_no_bytes_break_the_checker(content: bytes) -> None:
    (checked,) = check_all(content)
    assert isinstance(checked, UnservedLine)
