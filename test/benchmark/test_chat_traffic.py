"""Traffic of chats: turns that contain the turns before them."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from interference_bench.chat import CHATS, ChatTraffic
from sglang_coserve.errors import ConfigError
from sglang_coserve.workload.trace import TraceRequest

USUAL = ChatTraffic()


def chats_of(requests: list[TraceRequest]) -> list[list[TraceRequest]]:
    """Return the turns of each chat, which begin with the same block."""
    found = defaultdict(list)
    for request in requests:
        found[request.hash_ids[0]].append(request)
    return list(found.values())


def test_turns_come_at_the_rate_of_the_chats() -> None:
    requests = USUAL.requests(USUAL.rate_per_s(), seconds=450.0, seed=1)
    assert len(chats_of(requests)) == CHATS
    assert len(requests) == pytest.approx(CHATS * 10, rel=0.05)
    assert [one.index for one in requests] == list(range(len(requests)))
    assert sorted(one.arrival_s for one in requests) == [one.arrival_s for one in requests]


def test_a_turn_has_all_tokens_of_the_turn_before_and_new_ones() -> None:
    requests = USUAL.requests(USUAL.rate_per_s(), seconds=200.0, seed=0)
    for turns in chats_of(requests):
        assert turns[0].prompt_tokens == 6144 + 512
        for before, after in pairwise(turns):
            assert 0.8 * 45 <= after.arrival_s - before.arrival_s <= 1.2 * 45
            assert after.prompt_tokens == before.prompt_tokens + 512
            assert after.hash_ids[: len(before.hash_ids)] == before.hash_ids


def test_prompts_of_an_engine_share_whole_turns_that_end_within_a_block() -> None:
    traffic = ChatTraffic(history_tokens=700, turn_tokens=100)
    first, second = [*traffic.arrivals(1 / 45, 120.0, 0, 2000)][:2]
    assert len(first.prompt) == 800
    assert second.prompt[:800] == first.prompt


def test_a_chat_at_the_end_of_its_context_is_replaced_by_one_that_shares_nothing() -> None:
    traffic = ChatTraffic(history_tokens=1024, turn_tokens=512, context_tokens=2700)
    requests = traffic.requests(2 / 45, seconds=450.0, seed=0)
    chats = chats_of(requests)
    assert [len(turns) for turns in chats[:4]] == [3, 3, 3, 3]
    blocks = [set(turns[-1].hash_ids) for turns in chats]
    assert sum(map(len, blocks)) == len(set.union(*blocks))
    assert max(one.prompt_tokens + one.output_tokens for one in requests) <= 2700


def test_seeds_differ_and_repeat() -> None:
    one, same, other = (USUAL.requests(0.5, 60.0, seed) for seed in (0, 0, 1))
    assert one == same
    assert one != other


def test_a_first_turn_beyond_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most the context of 4000"):
        ChatTraffic(context_tokens=4000)
    with pytest.raises(ConfigError, match="at least one new token"):
        ChatTraffic(turn_tokens=0)
