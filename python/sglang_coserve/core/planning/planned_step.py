"""The step that is being planned: its work, how long it takes, and the memory that it finds.

Work is a sum over the batch. Memory is what is free, and what retracting requests would free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.planning.step_requests import StepRequests
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step import PrefillChunk, Retraction
from sglang_coserve.core.step_stats import StepStats

__all__ = ["StepMemory", "StepWork", "VictimOrder"]


class StepWork:
    """Sums up the prefills and decodes of one step, and predicts its latency with more of them."""

    def __init__(self, model: LatencyModel) -> None:
        """Start without work."""
        self._model = model
        # The sums, and the prefills not yet included in them: adding many at once is much cheaper
        # than creating a StepStats for each.
        self._stats = StepStats()
        self._pending: list[tuple[int, int]] = []
        self._predicted_s: float | None = 0.0
        self._probe: tuple[int, int, StepStats, float] | None = None

    @property
    def stats(self) -> StepStats:
        """Sums over the batch so far."""
        if self._pending:
            self._stats = _with_prefills(self._stats, self._pending)
            self._pending = []
        return self._stats

    @property
    def predicted_s(self) -> float:
        """Predicted latency of the batch so far."""
        if self._predicted_s is None:
            self._predicted_s = self._model.predict(self.stats)
        return self._predicted_s

    def add_decodes(self, requests: Sequence[Request]) -> None:
        """Add one token of each request. O(requests)."""
        self._stats = self._with_decodes(
            len(requests), sum([request.computed_tokens for request in requests])
        )
        self._predicted_s = self._probe = None

    def add_prefill(self, tokens: int, context_tokens: int) -> None:
        """Add ``tokens`` prompt tokens of one request, after ``context_tokens``."""
        probe = self._probe
        if probe is not None and probe[0] == tokens and probe[1] == context_tokens:
            _, _, self._stats, self._predicted_s = probe
        else:
            self._pending.append((tokens, context_tokens))
            self._predicted_s = None
        self._probe = None

    def predict_with_decodes(self, count: int, context_tokens: int) -> float:
        """Return the latency in seconds with ``count`` more decodes, whose contexts sum up to
        ``context_tokens``."""
        return self._model.predict(self._with_decodes(count, context_tokens))

    def predict_with_prefill(self, tokens: int, context_tokens: int) -> float:
        """Return the latency with one more prefill request; the sums are kept for
        ``add_prefill``."""
        stats = self.stats.with_prefill(tokens, context_tokens)
        seconds = self._model.predict(stats)
        self._probe = (tokens, context_tokens, stats, seconds)
        return seconds

    def predict_with_whole(self, requests: Iterable[Request], max_tokens: int) -> float:
        """Return the latency with the whole prompts of all requests; infinite if they have more
        than ``max_tokens``.

        O(requests), and at most O(max_tokens).
        """
        left_tokens = max_tokens
        prefills = []
        for request in requests:
            tokens = request.tokens_to_compute
            left_tokens -= tokens
            if left_tokens < 0:
                return math.inf
            prefills.append((tokens, request.computed_tokens or request.cached_tokens))
        return self._model.predict(_with_prefills(self.stats, prefills))

    def _with_decodes(self, count: int, context_tokens: int) -> StepStats:
        stats = self.stats
        return StepStats(
            stats.prefill_requests,
            stats.prefill_tokens,
            stats.prefill_context_tokens,
            stats.prefill_attention_pairs,
            stats.decode_requests + count,
            stats.decode_context_tokens + context_tokens + count,
        )


def _with_prefills(stats: StepStats, prefills: Iterable[tuple[int, int]]) -> StepStats:
    requests, tokens, context_tokens, pairs = (
        stats.prefill_requests,
        stats.prefill_tokens,
        stats.prefill_context_tokens,
        stats.prefill_attention_pairs,
    )
    for more, context in prefills:
        requests += 1
        tokens += more
        context_tokens += context
        pairs += more * (more + context)
    return StepStats(
        requests, tokens, context_tokens, pairs, stats.decode_requests, stats.decode_context_tokens
    )


_HEADROOM_OF: Final = 8
"""An engine with little KV keeps this part of it free, not all."""

VictimOrder = Callable[[StepRequests], Sequence[Request]]
"""Returns the offline requests in the order in which they are to be retracted."""


class StepMemory:
    """Keeps the KV and the request slots that are left, and retracts offline requests for more.

    KV is counted in slots, in whole pages. A prefill reserves the pages for all the tokens it
    has yet to compute, also in later chunks, so that nothing else in this plan gets
    them. A waiting request also reserves its cached tokens, because those slots
    can no longer be freed once it runs. In the pool of a sliding window a prefill takes
    the slots of its chunk, and in the long run no more than a window.
    """

    def __init__(self, requests: StepRequests, victim_order: VictimOrder) -> None:
        """Count what is free, less the next tokens of other micro-batches. O(requests elsewhere).

        Args:
            requests: The requests of the engine.
            victim_order: Order in which offline requests are retracted; asked for once, when
                memory is short.
        """
        snapshot = requests.snapshot
        self.free_slots = snapshot.free_slots
        self.free_kv_tokens = snapshot.free_kv_tokens + snapshot.evictable_kv_tokens
        """Negative, until ``spare_elsewhere`` has run, if other micro-batches need more KV than is
        free."""
        self.lacks_kv = False
        """Online work would not fit even with all offline requests retracted."""
        self._free_window_tokens = snapshot.free_window_tokens
        self._page_tokens = snapshot.page_tokens
        self._window_tokens = snapshot.window_tokens
        self._requests = requests
        self._victim_order = victim_order
        self.decodes: list[Sequence[Request]] = []
        """The decodes in the step, which are not retracted."""
        self.chunks: dict[str, PrefillChunk] = {}
        """The prefills in the step by request, in order; neither are these."""
        self._victims: Sequence[Request] | None = None
        self.retractions: dict[str, Retraction] = {}
        """The retractions so far, by request, in order."""
        self._asked_kv: tuple[Sequence[Request], int, int] = ((), 0, 0)
        """Cache of ``kv_to_decode``: the list last asked for, its length, and the result."""
        self._kv_tokens: int | None = None
        """All KV of the engine, once it was asked for."""
        self._kv_elsewhere = 0
        """KV of offline requests in other micro-batches, which only their own plans can retract."""
        if snapshot.elsewhere:
            self.free_kv_tokens -= self.kv_to_decode(snapshot.elsewhere)
            self._kv_elsewhere = sum(
                [
                    self._own_kv(request)
                    for request in snapshot.elsewhere
                    if not request.info.is_online
                ]
            )

    # --- what work needs ---

    def kv_to_decode(self, requests: Sequence[Request]) -> int:
        """Return the KV slots to allocate for one more token of each request, in whole pages.

        O(requests); O(1) when called again with the same list.
        """
        page = self._page_tokens
        if page == 1:
            return len(requests)
        asked, count, kv_tokens = self._asked_kv
        if asked is not requests or count != len(requests):
            kv_tokens = page * sum([request.computed_tokens % page == 0 for request in requests])
            self._asked_kv = requests, len(requests), kv_tokens
        return kv_tokens

    def kv_to_prefill(self, context_tokens: int, rest_tokens: int, *, is_new: bool) -> int:
        """Return the KV slots that a prefill reserves (see the class)."""
        page = self._page_tokens
        held_pages = 0 if is_new else -(-context_tokens // page)
        return page * (-(-(context_tokens + rest_tokens) // page) - held_pages)

    def align_chunk(self, context_tokens: int, rest_tokens: int, tokens: int) -> int:
        """Return the chunk length, shortened to a page boundary unless it ends the prompt."""
        if tokens < rest_tokens:
            tokens -= (context_tokens + tokens) % self._page_tokens
        return max(tokens, 0)

    def has_room(self, kv_tokens: int, slots: int = 0, *, requests: int = 1) -> bool:
        """Return whether so many KV slots and request slots are free, for ``requests`` in all."""
        return (
            self.free_kv_tokens >= kv_tokens
            and self.free_slots >= slots
            and self._free_window_tokens >= self._window_kv(kv_tokens, slots, requests)
        )

    def headroom_tokens(self, per_request: int, requests: int) -> int:
        """Return the KV to keep free for running requests: so much for each, up to an eighth of
        all KV. O(requests) the first time."""
        if self._kv_tokens is None:
            seen = self._requests.snapshot
            held_tokens = sum([request.computed_tokens for request in seen.admitted])
            self._kv_tokens = seen.free_kv_tokens + seen.evictable_kv_tokens + held_tokens
        return min(per_request * requests, self._kv_tokens // _HEADROOM_OF)

    # --- what it takes ---

    def take_for_decodes(self, requests: Sequence[Request]) -> None:
        """Take the KV for one more token of each request. O(requests)."""
        self.decodes.append(requests)
        self._take(kv_tokens := self.kv_to_decode(requests), kv_tokens)

    def take_for_prefill(self, rid: str, tokens: int, kv_tokens: int, *, is_new: bool) -> None:
        """Take ``kv_tokens`` of KV for a prefill that computes ``tokens`` in this step."""
        window_tokens = 0
        if self._window_tokens:
            # The engine cuts a chunk rather than leave no slots to the decodes in the same step.
            decodes_kv = self.kv_to_decode(self._requests.offline_decodes)
            left = self._free_window_tokens - decodes_kv
            window_tokens = max(min(tokens, left), min(kv_tokens, self._window_tokens))
        self.chunks[rid] = PrefillChunk(rid, tokens)
        self._take(kv_tokens, window_tokens)
        self.free_slots -= is_new

    # --- who is retracted ---

    def is_retracted(self, request: Request) -> bool:
        """Return whether this plan retracts the request."""
        return request.info.rid in self.retractions

    def without_retracted(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that this plan does not retract. O(requests)."""
        retractions = self.retractions
        return (
            [request for request in requests if request.info.rid not in retractions]
            if retractions
            else list(requests)
        )

    def next_victim(self) -> Request | None:
        """Return the offline request to retract next, ``None`` if there is none."""
        return next(self._remaining_victims(), None)

    def retract(self, request: Request, kv_tokens: int) -> None:
        """Release the last pages of a request, at least one, until ``kv_tokens`` of KV are free.

        Its first pages stay in the prefix cache, from which they are freed on demand.
        """
        page, own_kv = self._page_tokens, self._own_kv(request)
        short = max(kv_tokens - self.free_kv_tokens, 0)
        pages_kept = max(-(-request.computed_tokens // page) - max(-(-short // page), 1), 0)
        tokens = request.computed_tokens - min(pages_kept * page, request.computed_tokens)
        self.retractions[request.info.rid] = Retraction(request.info.rid, tokens)
        # The pages that stay cached are freed on demand, so they count as free.
        self._take(-own_kv, -min(own_kv, self._window_tokens))
        self.free_slots += 1

    def reclaim(self, kv_tokens: int, slots: int = 0, *, requests: int = 1) -> bool:
        """Retract offline requests until so much is free; return whether it is.

        If all of them together are not enough, none is retracted, unless the rest can come from
        offline requests of other micro-batches. O(offline requests).
        """
        if self.has_room(kv_tokens, slots, requests=requests):
            return True
        kv_short, slots_short = kv_tokens - self.free_kv_tokens, slots - self.free_slots
        window_short = self._window_kv(kv_tokens, slots, requests) - self._free_window_tokens
        victims: list[Request] = []
        for request in self._remaining_victims():
            if kv_short <= 0 and slots_short <= 0 and window_short <= 0:
                break
            victims.append(request)
            own_kv = self._own_kv(request)
            kv_short -= own_kv
            window_short -= min(own_kv, self._window_tokens)
            slots_short -= 1
        is_enough = kv_short <= 0 and slots_short <= 0 and window_short <= 0
        self.lacks_kv |= not is_enough
        if is_enough or 0 < kv_short <= self._kv_elsewhere:
            for request in victims:
                self.retract(request, kv_tokens)
        return is_enough

    def spare_elsewhere(self) -> None:
        """Retract offline requests until other micro-batches have KV for their next tokens.

        Must be called before anything is added.
        """
        if self.free_kv_tokens >= 0:
            return
        victims = self._remaining_victims()
        while self.free_kv_tokens < 0 and (victim := next(victims, None)) is not None:
            self.retract(victim, 0)
        self.free_kv_tokens = max(self.free_kv_tokens, 0)

    def decoding(self) -> set[str]:
        """Return the ids of the decodes in the step. O(decodes)."""
        return {request.info.rid for decodes in self.decodes for request in decodes}

    def _remaining_victims(self) -> Iterator[Request]:
        if self._victims is None:
            self._victims = self._victim_order(self._requests)
        added = self.decoding() | self.chunks.keys()
        for request in self._victims:
            rid = request.info.rid
            if not (rid in self.retractions or rid in added):
                yield request

    def _own_kv(self, request: Request) -> int:
        """Return the KV slots that only this request uses, in whole pages."""
        page = self._page_tokens
        return page * (-(-request.computed_tokens // page) - -(-request.cached_tokens // page))

    def _take(self, kv_tokens: int, window_tokens: int) -> None:
        self.free_kv_tokens -= kv_tokens
        if self._window_tokens:
            self._free_window_tokens -= window_tokens

    def _window_kv(self, kv_tokens: int, slots: int, requests: int) -> int:
        """Return how many slots of the sliding window's pool must be free for so much new KV.

        The engine cuts a chunk that does not fit, but leaves a page free behind it, and
        reserves a window for the output of each new request.
        """
        if not kv_tokens:
            return 0
        kv_tokens = max(kv_tokens + self._page_tokens, slots * self._window_tokens)
        return min(kv_tokens, requests * self._window_tokens)
