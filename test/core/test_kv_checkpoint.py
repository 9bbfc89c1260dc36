"""KV checkpointing decides by itself: page states, what to copy, quotas, back-off."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.core.kv_checkpoint import (
    Backoff,
    CheckpointMode,
    CheckpointPolicy,
    plan_copies,
    reclaim_tokens,
)

PAGE = 16
EAGER = CheckpointPolicy(CheckpointMode.EAGER)
PRESSURE = CheckpointPolicy(CheckpointMode.PRESSURE, watermark=0.8)

modes = st.sampled_from(CheckpointMode)
unsaved = st.lists(st.integers(0, 2000), max_size=12).map(
    lambda dirty: {f"r{i}": tokens for i, tokens in enumerate(dirty)}
)


def test_eager_copies_all_full_pages_of_all_requests() -> None:
    requests = {"a": 40, "b": 16, "c": 15}
    copies = plan_copies(EAGER, requests, PAGE, used_share=0.1)
    assert copies == {"a": 32, "b": 16}


def test_small_pages_wait_until_a_copy_is_worth_its_cost() -> None:
    requests = {"a": 17, "b": 16, "c": 15}
    copies = plan_copies(EAGER, requests, 1, used_share=0.1)
    assert copies == {"a": 17, "b": 16}
    at_once = replace(EAGER, least_copy_tokens=1)
    assert len(plan_copies(at_once, requests, 1, used_share=0.1)) == 3


def test_the_requests_admitted_last_are_saved_first() -> None:
    policy = replace(EAGER, step_tokens=2 * PAGE)
    requests = {"oldest": PAGE, "middle": PAGE, "newest": PAGE}
    copies = plan_copies(policy, requests, PAGE, used_share=0.1)
    assert list(copies) == ["newest", "middle"]


@pytest.mark.parametrize(("used_share", "copied"), [(0.79, 0), (0.8, 1), (0.95, 1)])
def test_pressure_copies_above_the_watermark(used_share: float, copied: int) -> None:
    requests = {"a": PAGE}
    assert len(plan_copies(PRESSURE, requests, PAGE, used_share=used_share)) == copied


@pytest.mark.parametrize("mode", [CheckpointMode.LAZY, CheckpointMode.OFF])
def test_lazy_and_off_copy_nothing_ahead(mode: CheckpointMode) -> None:
    requests = {"a": 1000}
    assert not plan_copies(CheckpointPolicy(mode), requests, PAGE, used_share=1.0)


@given(
    mode=modes,
    requests=unsaved,
    in_flight=st.integers(0, 20_000),
    page=st.sampled_from([1, 16]),
)
def test_plans_are_whole_pages_within_all_bounds(
    mode: CheckpointMode, requests: dict[str, int], in_flight: int, page: int
) -> None:
    policy = CheckpointPolicy(mode, step_tokens=1024, in_flight_tokens=8192)
    copies = plan_copies(policy, requests, page, used_share=0.9, in_flight_tokens=in_flight)
    assert all(0 < tokens <= requests[rid] for rid, tokens in copies.items())
    assert all(tokens % page == 0 for tokens in copies.values())
    total = sum(copies.values())
    assert total <= 1024
    assert total == 0 or in_flight + total <= 8192


@given(st.integers(1, 10_000), st.integers(0, 512), st.sampled_from([1, 16, 64]))
def test_reclaim_takes_whole_pages_and_at_least_a_chunk(wanted: int, least: int, page: int) -> None:
    tokens = reclaim_tokens(wanted, least, page)
    assert tokens % page == 0
    assert max(wanted, least) <= tokens < max(wanted, least) + page


def test_the_wait_doubles_with_every_refusal_up_to_a_bound() -> None:
    backoff, step, waits = Backoff(most_steps=8), 0, []
    for _ in range(6):
        backoff = backoff.failed(step)
        tries = step + 1
        while not backoff.may_try(tries):
            tries += 1
        waits.append(tries - step - 1)
        step = tries
    assert waits == [1, 2, 4, 8, 8, 8]
    assert backoff.succeeded().may_try(0)
