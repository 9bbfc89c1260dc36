"""Grammars are bounded: their text, and how many of them are kept."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.errors import RequestError
from sglang_coserve.guard.grammars import GrammarCache, check_grammars


def nested(levels: int) -> str:
    """A schema with so many brackets within each other, beside others."""
    return '{"items":' * (levels - 1) + '{"a": [{}], "b": {}}' + "}" * (levels - 1)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("regex", "x" * (1 << 19), "has 524288 characters"),
        ("ebnf", "x" * (1 << 19), "has 524288 characters"),
        ("json_schema", nested(200), "nested deeper than 200"),
        ("structural_tag", nested(200), "nested deeper than 200"),
    ],
    ids=lambda value: value[:20],
)
def test_a_grammar_that_is_too_large_is_refused(name: str, text: str, told: str) -> None:
    with pytest.raises(RequestError, match=f"{name}.*{told}"):
        check_grammars({name: text})


def test_what_is_large_and_flat_is_not_refused() -> None:
    properties = {f"p{n}": {"enum": ["[" * 10]} for n in range(300)}
    check_grammars({"json_schema": json.dumps({"properties": properties}), "regex": None})
    check_grammars({"json_schema": nested(190), "ebnf": 3})


keys = st.tuples(st.just("regex"), st.sampled_from("abcdef"))


@given(st.lists(st.tuples(st.booleans(), keys, st.integers(0, 40))))
def test_the_cache_keeps_what_was_used_last_within_its_bounds(calls: Any) -> None:
    cache = GrammarCache(most=3, most_bytes=60)
    order: list[Any] = []
    for is_set, key, size in calls:
        if is_set:
            grammar = SimpleNamespace(ctx=SimpleNamespace(memory_size_bytes=size))
            cache[key] = grammar
            order = [*(one for one in order if one != key), key]
            assert cache.get(key) is grammar
        elif cache.get(key) is not None:
            order = [*(one for one in order if one != key), key]
        kept = [one for one in order if one in cache]
        assert kept == order[-len(kept) :] if kept else not cache
        assert len(cache) <= 3
        assert sum(one.ctx.memory_size_bytes for one in cache.values()) <= 60
    cache.clear()
    assert cache.get(("regex", "a")) is None
