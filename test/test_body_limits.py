"""What a body holds is counted right, however it is cut into pieces."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.jsonl.body_limits import BodyLimits, BodyMeter, BodyTooLargeError

texts = st.text(st.sampled_from('a"\\,{[}]é😀\n')) | st.text()
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=30,
)


def counts(value: Any) -> tuple[int, int, int]:
    """Commas and opening brackets, opening braces, and colons, outside of strings."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    is_object = isinstance(value, dict)
    own = (max(1, len(value)), int(is_object), len(value) if is_object else 0)
    inner = [counts(each) for each in (value.values() if is_object else value)]
    num_values, num_objects, num_keys = map(sum, zip(own, *inner, strict=True))
    return num_values, num_objects, num_keys


def is_taken(content: bytes, piece_bytes: int, limits: BodyLimits) -> bool:
    meter = BodyMeter(limits)
    try:
        for start in range(0, len(content), piece_bytes):
            meter.take(content[start : start + piece_bytes])
    except BodyTooLargeError:
        return False
    return True


@given(values, st.booleans(), st.integers(1, 40))
def test_the_limits_are_exact(value: Any, ascii_only: bool, piece_bytes: int) -> None:
    content = json.dumps(value, ensure_ascii=ascii_only).encode()
    exact = BodyLimits(len(content), *counts(value))
    assert is_taken(content, piece_bytes, exact)
    for name in ("max_bytes", "max_values", "max_objects", "max_keys"):
        if most := getattr(exact, name):
            assert not is_taken(content, piece_bytes, replace(exact, **{name: most - 1}))


@given(st.binary(), st.integers(1, 40))
def test_any_bytes_can_be_measured(content: bytes, piece_bytes: int) -> None:
    assert is_taken(content, piece_bytes, BodyLimits())


def test_text_is_no_values() -> None:
    assert is_taken(json.dumps({"prompt": ',{["' * 500_000}).encode(), 1 << 16, BodyLimits())


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("x" * (5 << 20), "bytes"),
        ([1] * 300_000, "values"),
        ([{}] * 6_000, "objects"),
        (dict.fromkeys(map(str, range(30_000))), "keys"),
    ],
)
def test_what_is_too_much_is_said(value: Any, what: str) -> None:
    with pytest.raises(BodyTooLargeError, match=rf"[0-9,]+ {what}"):
        BodyMeter(BodyLimits()).take(json.dumps(value).encode())
