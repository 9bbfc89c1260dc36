"""Calls come out as they went in, however the bytes are divided, and bad ones are told apart."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.http_lines.line_stream import BadCallError, CallReader
from sglang_coserve.http_lines.messages import LineAttempt, LineCall, encode_message
from sglang_coserve.jsonl.body_limits import BodyLimits

LIMITS = BodyLimits(max_bytes=400)


def call(number: int, prompt: str = "a") -> LineCall:
    body = {"prompt": prompt}
    return LineCall(number, LineAttempt("batch_1", number, "/v1/completions", body, "model"))


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
