"""What a dropped step leaves behind, in SGLang's own pools and radix cache; without a model."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_coserve.srt import compat
from sglang_coserve.srt.kv_checkpoint.strategies import Eager
from sglang_coserve.srt.steps.engine_queues import EngineQueues
from sglang_coserve.srt.steps.offline_retraction import OfflineRetraction
from srt.kv_checkpoint.bare_cache import BareEngine, new_request, tokens_of

Req = Any


class Lane:
    """Prepares steps as SGLang does, without computing them."""

    def __init__(self, page_tokens: int) -> None:
        self.engine = BareEngine(Eager(), slots=1024, host_slots=1024, page_tokens=page_tokens)
        self.page_tokens = page_tokens
        self.requeued: list[Req] = []
        scheduler = SimpleNamespace(
            tree_cache=self.engine.cache,
            req_to_token_pool=self.engine.table,
            running_batch=SimpleNamespace(batch_is_full=True),
            _add_request_to_queue=self._requeue,
        )
        pools: Any = None
        # A dropped step hands aborted requests back to its caller.
        view, none = EngineQueues(scheduler), list[Req]()
        self.retraction = OfflineRetraction(scheduler, pools, view, Counter(), none.append)

    def _requeue(self, req: Req, *, is_retracted: bool) -> None:
        assert is_retracted
        self.requeued.append(req)

    def decode(self, prompt_tokens: int) -> Req:
        """Return a request whose next decode is prepared."""
        req = new_request(f"d{prompt_tokens}", range(1000, 1000 + prompt_tokens), offline=True)
        assert self.engine.admit(req)
        self.engine.running.remove(req)
        place = compat.computed_tokens(req)
        if place % self.page_tokens:
            row = self.engine.table.req_to_token[compat.slot_of(req)]
            slots = row[place - 1 : place] + 1
        else:
            slots = self.engine.allocator.alloc(self.page_tokens)[:1]
        self.engine.extend(req, slots)
        return req

    def prefill(self, rid: str, prompt: range) -> Req:
        """Return a request whose prefill is prepared, behind what is cached of it."""
        req = new_request(rid, prompt, offline=True)
        assert self.engine.give_row(req)
        tokens = len(prompt) - compat.computed_tokens(req)
        slots = self.engine.allocator.alloc(-(-tokens // self.page_tokens) * self.page_tokens)
        self.engine.extend(req, slots[:tokens])
        return req

    def drop(self, prefills: list[Req], decodes: list[Req]) -> list[Req]:
        """Drop a step of these; return those that are not to wait again."""
        batch: Any = SimpleNamespace(reqs=[*prefills, *decodes])
        aborted = self.retraction.release_unfinished(batch, len(prefills))
        self.engine.settle()
        self.engine.assert_consistent()
        return aborted


@pytest.fixture(params=[1, 16])
def lane(request: pytest.FixtureRequest) -> Lane:
    return Lane(request.param)


def test_decodes_go_on_from_all_their_whole_pages(lane: Lane) -> None:
    # Up to a page's last token, to its end, and one token into the next.
    decodes = [lane.decode(tokens) for tokens in (15, 31, 32, 33)]
    assert lane.drop([], decodes) == []
    assert lane.requeued == decodes
    for req in decodes:
        whole_pages = (len(tokens_of(req)) - 1) // lane.page_tokens * lane.page_tokens
        assert compat.cached_prefix_tokens(lane.engine.cache, req) == whole_pages
        assert lane.engine.admit(req)
        lane.engine.assert_consistent()


def test_a_prefill_leaves_what_was_cached_of_it_and_no_more(lane: Lane) -> None:
    lane.drop([], [lane.decode(64)])
    prefill = lane.prefill("p", range(1000, 1100))
    assert compat.prefix_tokens(prefill) == 64
    assert lane.drop([prefill, lane.prefill("new", range(5000, 5040))], []) == []
    assert compat.cached_prefix_tokens(lane.engine.cache, prefill) == 64
    assert compat.cached_prefix_tokens(lane.engine.cache, lane.requeued[-1]) == 0
    for req in lane.requeued[1:]:
        assert lane.engine.admit(req)
        lane.engine.assert_consistent()


def test_an_aborted_request_leaves_its_memory_and_does_not_wait(lane: Lane) -> None:
    goes_on, aborted = lane.decode(40), lane.decode(50)
    aborted.to_finish = FINISH_ABORT()
    assert lane.drop([], [goes_on, aborted]) == [aborted]
    assert lane.requeued == [goes_on]
    assert not compat.holds_kv(aborted)


def test_a_decode_that_has_ended_is_left_alone(lane: Lane) -> None:
    """Under overlap scheduling it may have ended with the step before."""
    ended = lane.decode(20)
    lane.drop([], [ended])
    assert lane.drop([], [ended]) == []
    assert lane.requeued == [ended]
