"""The KV and the request slots that the step being planned finds, and who is retracted for more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Final, NamedTuple

from sglang_coserve.core.control.shadow_kv import UNPROTECTED, Protection
from sglang_coserve.core.offline_queue import QueuedRequest
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, Request
from sglang_coserve.core.step import PrefillChunk, Retraction

_HEADROOM_OF: Final = 8
"""An engine with little KV keeps this part of it free, not all."""


class Prompt(NamedTuple):
    """What is left to compute of a request that prefills, or may begin to."""

    rid: str
    context_tokens: int
    """Tokens before it whose KV is there: computed, or in the prefix cache."""

    rest_tokens: int
    is_new: bool
    """It holds neither KV nor a slot yet."""

    @classmethod
    def of(cls, request: Request) -> Prompt:
        """Return that of a request of the snapshot."""
        context_tokens = request.computed_tokens or request.cached_tokens
        is_new = request.state is RequestState.WAITING
        return cls(request.info.rid, context_tokens, request.tokens_to_compute, is_new)

    @classmethod
    def queued(cls, request: QueuedRequest, cached_tokens: int) -> Prompt:
        """Return that of a request of the offline queue. At least its last token is left."""
        length_tokens = request.num_prompt_tokens + request.num_generated_tokens
        context_tokens = min(cached_tokens, length_tokens - 1)
        return cls(request.rid, context_tokens, length_tokens - context_tokens, True)


class StepMemory:
    """Keeps the KV and the request slots that are left, and retracts offline requests for more.

    KV is counted in slots, in whole pages. A prefill reserves the pages for all the tokens it
    has yet to compute, also in later chunks, so that nothing else in this plan gets
    them. A waiting request also reserves its cached tokens, because those slots
    can no longer be freed once it runs. In the pool of a sliding window a prefill takes
    the slots of its chunk, and in the long run no more than a window.
    """

    def __init__(
        self,
        snapshot: EngineSnapshot,
        victims: Callable[[], Sequence[Request]],
        protection: Protection = UNPROTECTED,
    ) -> None:
        """Count what is free, less the next tokens of other micro-batches.

        Offline requests are retracted if these need more than there is. O(requests elsewhere).
        ``victims`` returns them in the order in which they are to be retracted; it is called once,
        when memory is short. ``protection`` is KV that only online requests take.
        """
        self._snapshot = snapshot
        self._protection = protection
        self._page_tokens = snapshot.page_tokens
        self._chunk_rules = snapshot.chunk_rules
        self.free_slots = snapshot.free_slots
        self.free_kv_tokens = snapshot.free_kv_tokens + snapshot.evictable_kv_tokens
        self._free_window_tokens = snapshot.free_window_tokens
        self.lacks_kv = False
        """Online work would not fit even with all offline requests retracted."""
        self.decodes: list[Sequence[Request]] = []
        """The decodes in the step, which are not retracted."""
        self.chunks: dict[str, PrefillChunk] = {}
        """The prefills in the step by request, in order; neither are these."""
        self.retractions: dict[str, Retraction] = {}
        """The retractions so far, by request, in order."""
        self._victims = victims
        self._in_order: Sequence[Request] | None = None
        self._kv_elsewhere = 0
        """KV of offline requests in other micro-batches, which only their own plans can retract."""
        if snapshot.elsewhere:
            self.free_kv_tokens -= self.kv_to_decode(snapshot.elsewhere)
            offline = [one for one in snapshot.elsewhere if not one.info.is_online]
            self._kv_elsewhere = sum(map(self.own_kv, offline))
            if self.free_kv_tokens < 0:
                for victim in self._remaining_victims():
                    self.retract(victim, 0)
                    if self.free_kv_tokens >= 0:
                        break
                self.free_kv_tokens = max(self.free_kv_tokens, 0)

    # --- what work needs ---

    def kv_to_decode(self, requests: Sequence[Request]) -> int:
        """Return the KV slots to allocate for one more token of each request, in whole pages.

        O(requests).
        """
        page = self._page_tokens
        if page == 1:
            return len(requests)
        return page * sum([request.computed_tokens % page == 0 for request in requests])

    def kv_to_prefill(self, prompt: Prompt) -> int:
        """Return the KV slots that a prefill reserves (see the class)."""
        held_tokens = 0 if prompt.is_new else self._whole_pages(prompt.context_tokens)
        return self._whole_pages(prompt.context_tokens + prompt.rest_tokens) - held_tokens

    def align_chunk(self, prompt: Prompt, tokens: int) -> int:
        """Return the chunk length, shortened to what the engine computes of a prompt in one step.

        A chunk that does not end the prompt ends at a page boundary, and keeps the chunk rules.
        """
        rules, page = self._chunk_rules, self._page_tokens
        if tokens < prompt.rest_tokens:
            if not rules.may_cut:
                return 0
            if rules.align_tokens > 1:
                tokens -= tokens % math.lcm(rules.align_tokens, page)
            tokens -= (prompt.context_tokens + tokens) % page
        return max(tokens, 0)

    def has_room(self, kv_tokens: int, slots: int = 0, *, requests: int = 1) -> bool:
        """Return whether so many KV slots and request slots are free, for ``requests`` in all."""
        return max(self._short_of(kv_tokens, slots, requests)) <= 0

    def headroom_tokens(self, per_request: int, requests: int) -> int:
        """Return the KV to keep free for running requests: so much for each, up to an eighth of
        all KV. O(requests) the first time."""
        return min(per_request * requests, self.all_kv_tokens // _HEADROOM_OF)

    @cached_property
    def all_kv_tokens(self) -> int:
        """All KV but that of other micro-batches. O(requests)."""
        seen = self._snapshot
        held_tokens = sum([request.computed_tokens for request in seen.admitted])
        free_tokens = seen.free_kv_tokens + seen.evictable_kv_tokens
        return free_tokens + held_tokens + self._suspended_tokens

    @property
    def _suspended_tokens(self) -> int:
        """KV of the suspended step, all of offline requests."""
        suspended = self._snapshot.suspended
        return 0 if suspended is None else suspended.batch.total_tokens

    @cached_property
    def drained_kv_tokens(self) -> int:
        """KV that would be free if all offline requests of the snapshot had ended. O(requests)."""
        seen = self._snapshot
        offline = [one for one in seen.admitted if not one.info.is_online]
        held_tokens = sum(map(self.own_kv, offline)) + self._suspended_tokens
        return seen.free_kv_tokens + seen.evictable_kv_tokens + held_tokens

    def leaves_prefixes(
        self, kv_tokens: int, *, headroom_tokens: int = 0, added_tokens: int = 0
    ) -> bool:
        """Return whether so much more KV for offline requests leaves the protected prefixes cached.

        Also true within the offline requests' share of all KV. ``headroom_tokens`` stay free for
        running requests, but not in this share. ``added_tokens`` are for the offline requests that
        this plan has admitted. O(requests) where the KV is short.
        """
        tokens, offline_share = self._protection
        if not tokens or kv_tokens + headroom_tokens + tokens <= self.free_kv_tokens:
            return True
        offline = [one for one in self._snapshot.admitted if not one.info.is_online]
        held_tokens = sum([self.own_kv(one) for one in self.without_retracted(offline)])
        held_tokens += self._suspended_tokens + added_tokens + kv_tokens
        return held_tokens <= int(offline_share * self.all_kv_tokens)

    # --- what it takes ---

    def take_for_decodes(self, requests: Sequence[Request]) -> None:
        """Take the KV for one more token of each request. O(requests)."""
        self.decodes.append(requests)
        self._take(kv_tokens := self.kv_to_decode(requests), kv_tokens)

    def take_for_prefill(self, prompt: Prompt, tokens: int, beside: Sequence[Request]) -> None:
        """Take the KV for a prefill that computes ``tokens`` in this step.

        ``beside`` are decodes that may come into the same step.
        """
        kv_tokens, window_tokens = self.kv_to_prefill(prompt), self._snapshot.window_tokens
        if window_tokens:
            # The engine cuts a chunk rather than leave no slots to the decodes in the same step.
            left = self._free_window_tokens - self.kv_to_decode(beside)
            window_tokens = max(min(tokens, left), min(kv_tokens, window_tokens))
        self.chunks[prompt.rid] = PrefillChunk(prompt.rid, tokens)
        self._take(kv_tokens, window_tokens)
        self.free_slots -= prompt.is_new

    # --- who is retracted ---

    def is_retracted(self, request: Request) -> bool:
        """Return whether this plan retracts the request."""
        return request.info.rid in self.retractions

    def without_retracted(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that this plan does not retract. O(requests)."""
        if not self.retractions:
            return list(requests)
        return [request for request in requests if request.info.rid not in self.retractions]

    def next_victim(self) -> Request | None:
        """Return the offline request to retract next, ``None`` if there is none."""
        return next(self._remaining_victims(), None)

    def retract(self, request: Request, kv_tokens: int) -> None:
        """Release the last pages of a request, at least one, until ``kv_tokens`` of KV are free.

        Its first pages stay in the prefix cache, from which they are freed on demand.
        """
        short_tokens = max(kv_tokens - self.free_kv_tokens, 1)
        kept_tokens = self._whole_pages(request.computed_tokens) - self._whole_pages(short_tokens)
        tokens = request.computed_tokens - min(max(kept_tokens, 0), request.computed_tokens)
        self.retractions[request.info.rid] = Retraction(request.info.rid, tokens)
        # The pages that stay cached are freed on demand, so they count as free.
        own_kv = self.own_kv(request)
        self._take(-own_kv, -min(own_kv, self._snapshot.window_tokens))
        self.free_slots += 1

    def reclaim(self, kv_tokens: int, slots: int = 0, *, requests: int = 1) -> bool:
        """Retract offline requests until so much is free; return whether it is.

        If all of them together are not enough, none is retracted, unless the rest can come from
        offline requests of other micro-batches. O(offline requests).
        """
        kv_short, slots_short, window_short = self._short_of(kv_tokens, slots, requests)
        if max(kv_short, slots_short, window_short) <= 0:
            return True
        victims: list[Request] = []
        for request in self._remaining_victims():
            if max(kv_short, slots_short, window_short) <= 0:
                break
            victims.append(request)
            own_kv = self.own_kv(request)
            kv_short -= own_kv
            window_short -= min(own_kv, self._snapshot.window_tokens)
            slots_short -= 1
        is_enough = max(kv_short, slots_short, window_short) <= 0
        self.lacks_kv |= not is_enough
        if is_enough or 0 < kv_short <= self._kv_elsewhere:
            for request in victims:
                self.retract(request, kv_tokens)
        return is_enough

    def decoding(self) -> set[str]:
        """Return the ids of the decodes in the step. O(decodes)."""
        return {request.info.rid for decodes in self.decodes for request in decodes}

    def _remaining_victims(self) -> Iterator[Request]:
        if self._in_order is None:
            self._in_order = self._victims()
        added = self.decoding() | self.chunks.keys()
        for request in self._in_order:
            rid = request.info.rid
            if not (rid in self.retractions or rid in added):
                yield request

    def own_kv(self, request: Request) -> int:
        """Return the KV slots that only this request uses, in whole pages."""
        held_tokens = self._whole_pages(request.computed_tokens)
        return held_tokens - self._whole_pages(request.cached_tokens)

    def _whole_pages(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens) * self._page_tokens

    def _take(self, kv_tokens: int, window_tokens: int) -> None:
        self.free_kv_tokens -= kv_tokens
        if self._snapshot.window_tokens:
            self._free_window_tokens -= window_tokens

    def _short_of(self, kv_tokens: int, slots: int, requests: int) -> tuple[int, int, int]:
        """Return how many KV slots, request slots and slots of the sliding window's pool are
        missing; not above 0 where there are enough.

        The engine cuts a chunk that does not fit, but leaves a page free behind it, and
        reserves a window for the output of each new request.
        """
        window = self._snapshot.window_tokens
        window_kv = 0
        if kv_tokens and window:
            window_kv = max(kv_tokens + self._page_tokens, slots * window)
            window_kv = min(window_kv, requests * window)
        kv_short = kv_tokens - self.free_kv_tokens
        return kv_short, slots - self.free_slots, window_kv - self._free_window_tokens
