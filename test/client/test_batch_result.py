"""Records: OpenAI's batch output format, there and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_coserve.client.output_files import BatchResult, LineError, Response, decode_record
from sglang_coserve.lines.backend import LineResult
from sglang_coserve.lines.result_record import (
    encode_record,
    record_identity,
    usage_in_record,
    usage_of,
)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)
answers = st.builds(LineResult, st.integers(200, 299), st.text(), json_values)


@settings(deadline=None)
@given(answers, st.integers(1, 10**9), st.none() | st.text(min_size=1), st.integers(1, 2**64 - 1))
def test_a_record_is_one_line_and_decodes_to_its_result(
    answer: LineResult, line: int, custom_id: str | None, digest: int
) -> None:
    record = encode_record(digest, line, custom_id, answer)
    assert record.count(b"\n") == 1
    assert record.endswith(b"\n")
    assert record_identity(record) == (digest, line)
    assert list(json.loads(record)) == ["id", "custom_id", "response", "error"]
    assert usage_in_record(record) == usage_of(answer.body)
    response = Response(answer.status_code, answer.request_id, answer.body)
    assert decode_record(record) == BatchResult(line, custom_id, response)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_readers_that_split_at_every_separator_get_whole_records(separator: str) -> None:
    text = f"a{separator}b"
    record = encode_record(255, 7, text, LineResult(200, "rid", {"text": text}))
    (line,) = record.decode().splitlines()
    assert json.loads(line)["custom_id"] == text
    assert decode_record(record) == BatchResult(7, text, Response(200, "rid", {"text": text}))


@pytest.mark.parametrize(
    "body", [{"error": {"message": "no such thing"}}, {"message": "no such thing"}, "no such thing"]
)
def test_a_refused_line_is_told_by_its_answer(body: Any) -> None:
    record = encode_record(1, 7, "a", LineResult(400, "r", body))
    assert json.loads(record)["error"] is None
    result = decode_record(record)
    assert (result.line, result.ok) == (7, False)
    assert result.response == Response(400, "r", body)
    assert result.error == LineError("http_400", "no such thing")


def test_a_line_without_an_answer_says_why() -> None:
    record = encode_record(1, 7, None, LineResult.unserved("code", "why"))
    assert json.loads(record)["response"] is None
    assert decode_record(record) == BatchResult(7, None, None, LineError("code", "why"))


def test_half_a_surrogate_pair_survives() -> None:
    answer = LineResult(200, "", {"text": "half \ud83d"})
    response = Response(200, "", {"text": "half \ud83d"})
    assert decode_record(encode_record(1, 1, "a", answer)) == BatchResult(1, "a", response)


def test_what_json_has_no_number_for_is_null() -> None:
    record = encode_record(1, 1, "a", LineResult(200, "", {"logprob": float("-inf")}))
    assert json.loads(record)["response"]["body"] == {"logprob": None}


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
