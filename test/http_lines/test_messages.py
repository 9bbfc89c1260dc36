"""What is said about a line comes over as it was said."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.errors import RequestError
from sglang_coserve.http_lines.messages import (
    LineAttempt,
    LineEvent,
    attempt_of,
    decode_message,
    encode_message,
    request_of,
)
from sglang_coserve.lines.backend import FailureKind, LineRequest, LineResult, MovedKv

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(TEXT, VALUES, max_size=4)


@given(
    body=BODIES,
    generated=st.lists(st.integers(0, 1 << 31), max_size=5),
    left_s=st.floats(-1e6, 1e6) | st.just(math.inf),
    expected=st.none() | st.integers(0, 10_000),
    kv=st.none() | st.builds(MovedKv, TEXT, st.integers(0, 1 << 20)),
)
def test_a_request_keeps_all_but_the_clock(
    body: dict[str, Any],
    generated: list[int],
    left_s: float,
    expected: int | None,
    kv: MovedKv | None,
) -> None:
    here_s, there_s = 1_000.0, 77_000.0
    request = LineRequest(
        "batch_1", 3, "/v1/completions", body, tuple(generated), here_s + left_s, expected, kv
    )
    content = encode_message(attempt_of(request, "model", here_s))
    assert content.count(b"\n") == 1
    attempt = decode_message(content, LineAttempt)
    there = request_of(attempt, there_s)
    assert attempt.model == "model"
    assert (there.body, there.generated) == (body, tuple(generated))
    assert there.expected_output_tokens == expected
    assert there.kv == kv
    if math.isinf(left_s):
        assert math.isinf(there.deadline_s)
    else:
        assert there.deadline_s - there_s == pytest.approx(left_s, abs=1e-3)


@given(
    status=st.integers(0, 599),
    body=BODIES,
    is_retryable=st.booleans(),
    kind=st.sampled_from(FailureKind),
    pause_s=st.floats(0, 100),
)
def test_a_result_comes_over_whole(
    status: int, body: dict[str, Any], is_retryable: bool, kind: FailureKind, pause_s: float
) -> None:
    result = LineResult(status, "id", body, is_retryable, kind, pause_s)
    event = decode_message(encode_message(LineEvent(5, result=result)), LineEvent)
    assert event == LineEvent(5, result=result)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"batch_id":1}', b"\xff"])
def test_something_else_is_told_apart(content: bytes) -> None:
    with pytest.raises(RequestError, match="LineAttempt"):
        decode_message(content, LineAttempt)


@pytest.mark.parametrize(
    "body", [{"text": "\ud800"}, {"\udc00": ["a\udfff\u00e9"]}, {"text": "\ud83d\ude00"}, "\ud800"]
)
def test_a_text_that_no_utf8_has_comes_over(body: Any) -> None:
    event = LineEvent(5, result=LineResult(200, "id", body))
    content = encode_message(event)
    assert content.isascii() and content.count(b"\n") == 1
    found = decode_message(content, LineEvent)
    # Two halves that follow each other are one character, in JSON.
    assert json.dumps(msgspec.to_builtins(found)) == json.dumps(msgspec.to_builtins(event))
