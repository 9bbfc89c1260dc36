"""What is said about a line comes over as it was said, however its bytes are divided."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.http_lines.line_stream import BadCallError, CallReader
from sglang_coserve.http_lines.messages import (
    LineCall,
    LineEvent,
    decode_message,
    encode_message,
)
from sglang_coserve.jsonl.body_limits import BodyLimits
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
    event = LineEvent(5, result=LineResult(200, "id", body))
    content = encode_message(event)
    assert content.isascii() and content.count(b"\n") == 1
    found = decode_message(content, LineEvent)
    # Two halves that follow each other are one character, in JSON.
    assert json.dumps(msgspec.to_builtins(found)) == json.dumps(msgspec.to_builtins(event))


LIMITS = BodyLimits(max_bytes=400)


def call(number: int, prompt: str = "a") -> LineCall:
    body = {"prompt": prompt}
    return LineCall(number, LineRequest("batch_1", number, "/v1/completions", body, model="model"))


def read(pieces: Iterable[bytes]) -> list[LineCall | BadCallError]:
    reader = CallReader(LIMITS)
    return [found for piece in pieces for found in reader.feed(piece)]


@given(
    prompts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=10), max_size=5),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
)
def test_pieces_of_any_size_make_the_same_calls(prompts: list[str], cuts: list[int]) -> None:
    calls = [call(number, prompt) for number, prompt in enumerate(prompts, 1)]
    calls += [LineCall(number, None) for number in range(1, len(prompts) + 1)]
    content = b"\n".join(map(encode_message, calls))  # Empty lines between them say nothing.
    bounds = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    pieces = [content[a:b] for a, b in pairwise(bounds)]
    assert read(pieces) == calls


def test_a_call_that_is_too_large_is_named_and_the_next_one_is_read() -> None:
    large = encode_message(call(12, "x" * 1000))
    pieces = [encode_message(call(11)), large[:30], large[30:900], large[900:]]
    first, bad, last = read([*pieces, encode_message(call(13))])
    assert (first, last) == (call(11), call(13))
    assert isinstance(bad, BadCallError)
    assert (bad.call, bad.is_too_large) == (12, True)
    assert "400 bytes" in str(bad)


def test_a_call_that_cannot_be_read_is_named_if_it_begins_with_its_id() -> None:
    contents = (b'{"id":7,"attempt":{}}\n', b'{"attempt":null,"id":-7}\n', b'{"id":0,}\n', b"x\n")
    found = read(contents)
    assert [bad.call for bad in found if isinstance(bad, BadCallError)] == [7, None, None]
    assert found[1] == LineCall(-7, None)
