"""What is said about a line comes over as it was said, however its bytes are divided."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.http_lines.http_engine import ended_lines
from sglang_coserve.http_lines.messages import LineEvent, decode_message, encode_message
from sglang_coserve.lines.backend import LineRequest, LineResult, MovedKv

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
    left_s=st.floats(-1e6, 1e6) | st.none(),
    expected=st.none() | st.integers(0, 10_000),
    kv=st.none() | st.builds(MovedKv, TEXT, st.integers(0, 1 << 20)),
)
def test_a_request_keeps_all_but_the_clock(
    body: dict[str, Any],
    generated: list[int],
    left_s: float | None,
    expected: int | None,
    kv: MovedKv | None,
) -> None:
    here_s, there_s = 1_000.0, 77_000.0
    deadline_s = None if left_s is None else here_s + left_s
    request = LineRequest(
        "batch_1", 3, "/v1/completions", body, tuple(generated), deadline_s, expected, kv
    )
    content = encode_message(request.to_wire("model", here_s))
    assert content.count(b"\n") == 1 and b"deadline_s" not in content
    there = decode_message(content, LineRequest).from_wire(there_s)
    due_s = None if left_s is None else pytest.approx(there_s + left_s, abs=1e-3)
    assert there.deadline_s == due_s
    assert msgspec.structs.replace(there, deadline_s=deadline_s, model="") == request


@pytest.mark.parametrize(
    "body", [{"text": "\ud800"}, {"\udc00": ["a\udfff\u00e9"]}, {"text": "\ud83d\ude00"}, "\ud800"]
)
def test_a_text_that_no_utf8_has_comes_over(body: Any) -> None:
    event = LineEvent(result=LineResult(200, "id", body))
    content = encode_message(event)
    assert content.isascii() and content.count(b"\n") == 1
    found = decode_message(content, LineEvent)
    # Two halves that follow each other are one character, in JSON.
    assert json.dumps(msgspec.to_builtins(found)) == json.dumps(msgspec.to_builtins(event))


EVENTS = st.one_of(
    st.builds(
        LineEvent,
        st.lists(st.integers(0, 1 << 31), min_size=1, max_size=5).map(tuple),
        st.integers(0, 1 << 20),
    ),
    st.builds(LineEvent, result=st.builds(LineResult, st.integers(0, 599), TEXT, BODIES)),
    st.builds(LineEvent, moved=TEXT, kv=st.none() | st.builds(MovedKv, TEXT, st.integers(0, 9))),
)


@given(
    events=st.lists(EVENTS, max_size=5),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
)
def test_pieces_of_any_size_make_the_same_events(events: list[LineEvent], cuts: list[int]) -> None:
    content = b"\n".join(map(encode_message, events))  # Empty lines between them say nothing.
    bounds = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    rest: list[bytes] = []
    found = [
        decode_message(line, LineEvent)
        for begin, end in pairwise(bounds)
        for line in ended_lines(rest, content[begin:end])
    ]
    assert found == events
