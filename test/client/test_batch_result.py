"""Records: OpenAI's batch output format, there and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_coserve.client.batch_result import (
    BatchResult,
    LineError,
    Response,
    decode_record,
    encode_record,
    record_identity,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)
results = st.builds(
    BatchResult,
    line=st.integers(1, 10**9),
    custom_id=st.none() | st.text(min_size=1),
    response=st.none() | st.builds(Response, st.integers(200, 599), st.text(), json_values),
    error=st.none() | st.builds(LineError, st.text(), st.text()),
)


@settings(deadline=None)
@given(results, st.integers(1, 2**64 - 1))
def test_a_record_is_one_line_and_decodes_to_its_result(result: BatchResult, digest: int) -> None:
    record = encode_record(result, digest)
    assert record.count(b"\n") == 1
    assert record.endswith(b"\n")
    assert record_identity(record) == (result.line, digest)
    assert decode_record(record) == result


def test_a_served_line_has_the_four_fields_of_the_format() -> None:
    record = json.loads(encode_record(BatchResult(7, "a", Response(200, "rid", {"x": 1})), 255))
    assert record == {
        "id": "batch_req_7_00000000000000ff",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "rid", "body": {"x": 1}},
        "error": None,
    }


def test_a_failed_line_says_which_line_it_is() -> None:
    record = json.loads(encode_record(BatchResult(7, None, None, LineError("code", "why")), 1))
    assert record["line"] == 7
    assert record["custom_id"] is None
    assert record["response"] is None
    assert record["error"] == {"code": "code", "message": "why"}


def test_half_a_surrogate_pair_survives() -> None:
    result = BatchResult(1, "a", Response(200, "", {"text": "half \ud83d"}))
    assert decode_record(encode_record(result, 1)) == result


def test_text_stays_readable() -> None:
    assert "日本".encode() in encode_record(BatchResult(1, "日本"), 1)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"choices": [{"message": {"content": "chat"}}]}, "chat"),
        ({"choices": [{"text": "completion"}, {"text": "second"}]}, "completion"),
        ({"choices": [{"message": {"content": None, "tool_calls": []}}]}, None),
        ({"data": [{"embedding": [1.0]}]}, None),
        ({"choices": []}, None),
        ("text", None),
    ],
)
def test_the_text_of_an_answer(body: Any, text: str | None) -> None:
    assert BatchResult(1, "a", Response(200, "", body)).text == text


def test_a_failed_line_has_neither_text_nor_tokens() -> None:
    result = BatchResult(1, "a", Response(400, "", {"message": "no"}), LineError("http_400", "no"))
    assert not result.ok
    assert (result.text, result.prompt_tokens, result.completion_tokens) == (None, 0, 0)


@pytest.mark.parametrize(
    "other", [b"", b"{}\n", b'{"id":"batch_req_1_00000000000000ff"\n', b'{"id":"batch_req_0_1",}\n']
)
def test_other_lines_are_not_records(other: bytes) -> None:
    assert record_identity(other) is None
    with pytest.raises(ValueError, match="not a record"):
        decode_record(other)
