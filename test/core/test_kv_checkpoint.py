"""What is copied of KV and what is reclaimed, and how long it waits for host memory."""

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


@pytest.mark.parametrize(
    ("policy", "page", "used_share", "dirty", "copies"),
    [
        pytest.param(EAGER, PAGE, 0.1, (40, 16, 15), {"b": 16, "a": 32}, id="full pages"),
        pytest.param(EAGER, 1, 0.1, (17, 16, 15), {"b": 16, "a": 17}, id="worth a copy"),
        pytest.param(
            replace(EAGER, least_copy_tokens=1), 1, 0.1, (1, 2), {"b": 2, "a": 1}, id="at once"
        ),
        pytest.param(
            replace(EAGER, step_tokens=2 * PAGE),
            *(PAGE, 0.1, (PAGE, PAGE, PAGE), {"c": PAGE, "b": PAGE}),
            id="the last admitted first",
        ),
        pytest.param(PRESSURE, PAGE, 0.79, (PAGE,), {}, id="below the watermark"),
        pytest.param(PRESSURE, PAGE, 0.8, (PAGE,), {"a": PAGE}, id="at the watermark"),
        pytest.param(CheckpointPolicy(CheckpointMode.LAZY), PAGE, 1.0, (1000,), {}, id="lazy"),
        pytest.param(CheckpointPolicy(CheckpointMode.OFF), PAGE, 1.0, (1000,), {}, id="off"),
    ],
)
def test_what_is_copied_and_in_which_order(
    policy: CheckpointPolicy,
    page: int,
    used_share: float,
    dirty: tuple[int, ...],
    copies: dict[str, int],
) -> None:
    requests = dict(zip("abc", dirty, strict=False))
    found = plan_copies(policy, requests, page, used_share=used_share)
    assert list(found.items()) == list(copies.items())


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
