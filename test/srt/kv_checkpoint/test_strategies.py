"""Strategies of checkpoints: the KV that is copied, and when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.config.coserve import CHECKPOINT_STRATEGIES
from sglang_coserve.srt.kv_checkpoint.strategies import STRATEGIES, Eager, Lazy, Strategy

PAGE = 16

unsaved = st.lists(st.integers(0, 2000), max_size=12).map(
    lambda dirty: {f"r{i}": tokens for i, tokens in enumerate(dirty)}
)


@pytest.mark.parametrize(
    ("strategy", "page", "dirty", "copies"),
    [
        pytest.param(Eager(), PAGE, (40, 16, 15), {"b": 16, "a": 32}, id="full pages"),
        pytest.param(Eager(), 1, (17, 16, 15), {"b": 16, "a": 17}, id="worth a copy"),
        pytest.param(Eager(least_copy_tokens=1), 1, (1, 2), {"b": 2, "a": 1}, id="at once"),
        pytest.param(
            Eager(step_tokens=2 * PAGE),
            *(PAGE, (PAGE, PAGE, PAGE), {"c": PAGE, "b": PAGE}),
            id="the last admitted first",
        ),
        pytest.param(Lazy(), PAGE, (1000,), {}, id="lazy"),
    ],
)
def test_what_is_copied_and_in_which_order(
    strategy: Strategy, page: int, dirty: tuple[int, ...], copies: dict[str, int]
) -> None:
    requests = dict(zip("abc", dirty, strict=False))
    found = strategy.to_copy(requests, page, 0)
    assert list(found.items()) == list(copies.items())


@given(
    requests=unsaved,
    in_flight=st.integers(0, 20_000),
    page=st.sampled_from([1, 16]),
)
def test_eager_copies_are_whole_pages_within_all_bounds(
    requests: dict[str, int], in_flight: int, page: int
) -> None:
    eager = Eager(step_tokens=1024, most_in_flight_tokens=8192)
    copies = eager.to_copy(requests, page, in_flight)
    assert all(0 < tokens <= requests[rid] for rid, tokens in copies.items())
    assert all(tokens % page == 0 for tokens in copies.values())
    total = sum(copies.values())
    assert total <= 1024
    assert total == 0 or in_flight + total <= 8192


def test_each_strategy_of_the_flag_is_there() -> None:
    assert tuple(STRATEGIES) == CHECKPOINT_STRATEGIES
    made: list[Any] = [kind() for kind in STRATEGIES.values()]
    assert tuple(strategy.name for strategy in made) == CHECKPOINT_STRATEGIES
