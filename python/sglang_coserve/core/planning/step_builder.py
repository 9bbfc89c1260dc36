"""Builds the plan of one step: the batch so far, and the tokens, KV and slots left for more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.request import RequestClass, RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, Request, RequestInfo
from sglang_coserve.core.step import ExpectedResult, Lane, PrefillChunk, Retraction, StepPlan
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.metrics import SloTargets

__all__ = ["StepBuilder", "VictimOrder"]

VictimOrder = Callable[["StepBuilder"], Sequence[Request]]
"""Returns the offline requests in the order in which they are to be retracted."""

_DECODING = RequestState.DECODING
_PAUSED = RequestState.PAUSED
_PREFILLING = RequestState.PREFILLING
_WAITING = RequestState.WAITING
_ONLINE = RequestClass.ONLINE


class StepBuilder:
    """Collects the work of one step during a call of ``Scheduler.plan``.

    A policy adds work to it. It keeps the sums over the batch, the predicted latency, and
    the tokens, KV and request slots left. Latency limits are up to the policy.

    KV is counted in slots, in whole pages. A prefill reserves the pages for all the tokens it
    has yet to compute, also in later chunks, so that nothing else in this plan gets
    them. A waiting request also reserves its cached tokens, because those slots
    can no longer be freed once it runs. In the pool of a sliding window a prefill takes
    the slots of its chunk, and in the long run no more than a window.
    """

    def __init__(
        self,
        snapshot: EngineSnapshot,
        model: LatencyModel,
        targets: SloTargets,
        victim_order: VictimOrder,
        lane: Lane = Lane.SHARED,
        *,
        rides: bool = True,
        mean_due_s: Callable[[RequestInfo], float] | None = None,
    ) -> None:
        """Start with an empty batch; sort the requests by what they may do next. O(requests).

        Args:
            snapshot: The engine; for the offline lane, without online requests.
            model: Predicts the latency of the batch.
            targets: TTFT and TPOT targets of online requests without their own.
            victim_order: Order in which offline requests are retracted.
            lane: Lane of the step.
            rides: Paused offline decodes may join a step of the shared lane.
            mean_due_s: Returns when an online request's next token is due for its mean gap to
                stay within target; None if no SLO bounds the mean gap.
        """
        self.snapshot = snapshot
        self.lane = lane
        self._rides = rides or lane is Lane.OFFLINE
        self.model = model
        self.targets = targets

        self.offline_budget_s = math.inf
        self.has_left_over_online = False
        """An online prompt got fewer tokens than it could use, so offline work gets none."""

        self.is_deadline_bound = False
        self.online_part_s = 0.0
        self.skips_decodes = False
        """The step runs prompts only: no request decodes in it."""

        self.lacks_kv = False
        """Online work would not fit even with all offline requests retracted."""
        self.admits_offline = True
        """False when an online request waits for KV that new offline requests must not take."""
        self.free_tokens = snapshot.max_batch_tokens
        self.free_slots = snapshot.free_slots
        self.free_kv_tokens = snapshot.free_kv_tokens + snapshot.evictable_kv_tokens
        """Negative, until ``spare_elsewhere`` has run, if other micro-batches need more KV than is
        free."""

        self.free_window_tokens = snapshot.free_window_tokens

        self.online_decodes: list[Request] = []
        """Online requests that decode or are paused."""
        self.online_prefills: list[Request] = []
        """Online requests whose prefill is unfinished, the running one first."""
        self.offline_decodes: list[Request] = []
        """Offline requests that decode or are paused, in order of admission; those that cannot
        pause before the others."""
        self.staying_decodes: list[Request] = []
        """Paused offline decodes that do not join this step."""
        self.offline_prefills: list[Request] = []
        """Offline requests whose prefill is unfinished, the running one first."""
        self.elsewhere_s = math.inf
        """The strictest TPOT target of the online requests in other micro-batches."""
        self.tpot_slack_s = math.inf
        """Time until the first online decode misses its TPOT target. A decode in another
        micro-batch is assumed to have got its last token just now."""
        self._due_s: list[float] = []
        self._mean_due_s = mean_due_s
        self._offline_slack_s: float | None = None

        self._has_online_elsewhere = False
        self._kv_elsewhere = 0
        """KV of offline requests in other micro-batches, which only their own plans can retract."""

        self._page_tokens = snapshot.page_tokens
        self._window_tokens = snapshot.window_tokens
        self._victim_order = victim_order
        self._victims: Sequence[Request] | None = None
        self._retractions: dict[str, Retraction] = {}
        # The sums, and the prefills not yet included in them: adding many at once is much cheaper
        # than creating a StepStats for each.
        self._stats = StepStats()
        self._predicted_s: float | None = 0.0
        self._pending: list[tuple[int, int]] = []
        self._probe: tuple[int, int, StepStats, float] | None = None
        self._asked_kv: tuple[Sequence[Request], int, int] = ((), 0, 0)
        """Cache of ``kv_to_decode``: the list last asked for, its length, and the result."""
        self._shed: list[str] = []
        self._chunks: dict[str, PrefillChunk] = {}
        self._decoding: set[str] = set()
        self._sort_requests()
        if snapshot.elsewhere:
            self._reserve_for_other_micro_batches()

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
            self._predicted_s = self.model.predict(self.stats)
        return self._predicted_s

    @property
    def has_online(self) -> bool:
        """True when an online request waits or runs, in this or another micro-batch."""
        return (
            bool(self.online_decodes or self.online_prefills or self.snapshot.waiting)
            or self._has_online_elsewhere
        )

    @property
    def offline_requests(self) -> list[Request]:
        """All offline requests."""
        return self.offline_decodes + self.staying_decodes + self.offline_prefills

    @property
    def offline_slack_s(self) -> float:
        """Time until offline work would make the first online decode late: ``tpot_slack_s``, or
        less where earlier gaps have already used up a request's mean.

        O(online decodes) on the first access.
        """
        if self._offline_slack_s is None:
            self._offline_slack_s = self.tpot_slack_s
            if self._mean_due_s is not None and self.online_decodes:
                due_s = min([self._mean_due_s(request.info) for request in self.online_decodes])
                self._offline_slack_s = min(self.tpot_slack_s, due_s - self.snapshot.now_s)
        return self._offline_slack_s

    def least_tpot_s(self, default_s: float) -> float:
        """Return the strictest TPOT target of the online decodes, in seconds. O(requests).

        ``default_s`` is the target of requests without their own, and the result if no online
        request decodes.
        """
        targets_s = [request.info.tpot_target_s or default_s for request in self.online_decodes]
        return min(min(targets_s, default=default_s), self.elsewhere_s)

    def reserve_rest_for_online(self, *, by_deadline: bool) -> None:
        """Leave no budget for offline work, since an online prompt got less than it could use.

        ``by_deadline``: the prompt was cut because a deadline would have been missed otherwise.
        """
        self.has_left_over_online = True
        self.offline_budget_s = 0.0
        self.is_deadline_bound |= by_deadline

    def without_retracted(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that this plan does not retract. O(requests)."""
        retractions = self._retractions
        return (
            [request for request in requests if request.info.rid not in retractions]
            if retractions
            else list(requests)
        )

    def is_retracted(self, request: Request) -> bool:
        """Return whether this plan retracts the request."""
        return request.info.rid in self._retractions

    def limit_tokens(self, tokens: int) -> None:
        """Add at most ``tokens`` more tokens to the batch."""
        self.free_tokens = min(self.free_tokens, tokens)

    # --- decodes ---

    def decode(self, requests: Sequence[Request]) -> None:
        """Add decodes; the caller has checked that there is KV for them. O(requests)."""
        if not requests:
            return
        self._stats = self._with_decodes(
            len(requests), sum([request.computed_tokens for request in requests])
        )
        self._predicted_s = self._probe = None
        self.free_tokens -= len(requests)
        self._take(kv_tokens := self.kv_to_decode(requests), kv_tokens)
        self._decoding.update([request.info.rid for request in requests])

    def predict_with_decodes(self, count: int, context_tokens: int) -> float:
        """Return the latency in seconds with ``count`` more decodes, whose contexts sum up to
        ``context_tokens``."""
        return self.model.predict(self._with_decodes(count, context_tokens))

    def longest_prefill(self, count: int, context_tokens: int, budget_s: float) -> int:
        """Return the most prompt tokens that fit the latency budget beside ``count`` more decodes,
        whose contexts sum up to ``context_tokens``."""
        tokens = self.free_tokens - count
        if tokens <= 0:
            return 0
        stats = self._with_decodes(count, context_tokens)
        return self.model.max_prefill_tokens(stats, 0, tokens, budget_s)

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

    # --- prefills ---

    def kv_to_prefill(self, context_tokens: int, rest_tokens: int, *, is_new: bool) -> int:
        """Return the KV slots that a prefill reserves (see the class)."""
        page = self._page_tokens
        held_pages = 0 if is_new else -(-context_tokens // page)
        return page * (-(-(context_tokens + rest_tokens) // page) - held_pages)

    def longest_chunk(self, context_tokens: int, rest_tokens: int, budget_s: float) -> int:
        """Return the longest chunk that keeps the batch within the latency budget."""
        tokens = min(rest_tokens, self.free_tokens)
        if tokens > 0 and budget_s < math.inf:
            tokens = self.model.max_prefill_tokens(self.stats, context_tokens, tokens, budget_s)
        return self.align_chunk(context_tokens, rest_tokens, tokens)

    def align_chunk(self, context_tokens: int, rest_tokens: int, tokens: int) -> int:
        """Return the chunk length, shortened to a page boundary unless it ends the prompt."""
        if tokens < rest_tokens:
            tokens -= (context_tokens + tokens) % self._page_tokens
        return max(tokens, 0)

    def predict_with_prefill(self, tokens: int, context_tokens: int) -> float:
        """Return the latency with one more prefill request; the sums are kept for ``prefill``."""
        stats = self.stats.with_prefill(tokens, context_tokens)
        seconds = self.model.predict(stats)
        self._probe = (tokens, context_tokens, stats, seconds)
        return seconds

    def predict_with_whole(self, requests: Iterable[Request]) -> float:
        """Return the latency with the whole prompts of all requests; infinite if they exceed the
        free tokens.

        O(requests), and at most O(free tokens).
        """
        left_tokens = self.free_tokens
        prefills = []
        for request in requests:
            tokens = request.tokens_to_compute
            left_tokens -= tokens
            if left_tokens < 0:
                return math.inf
            prefills.append((tokens, request.computed_tokens or request.cached_tokens))
        return self.model.predict(_with_prefills(self.stats, prefills))

    def prefill(
        self, rid: str, tokens: int, context_tokens: int, kv_tokens: int, *, is_new: bool
    ) -> None:
        """Add a chunk of ``tokens`` prompt tokens, and reserve ``kv_tokens`` of KV for it."""
        assert 0 < tokens <= self.free_tokens, f"{rid}: {tokens} of {self.free_tokens} tokens"
        probe = self._probe
        if probe is not None and probe[0] == tokens and probe[1] == context_tokens:
            _, _, self._stats, self._predicted_s = probe
        else:
            self._pending.append((tokens, context_tokens))
            self._predicted_s = None
        self._probe = None
        self.free_tokens -= tokens
        self._take(kv_tokens, self._window_kv_of_prefill(tokens, kv_tokens))
        self.free_slots -= is_new
        self._chunks[rid] = PrefillChunk(rid, tokens)

    # --- memory ---

    def has_room(self, kv_tokens: int, slots: int = 0, *, requests: int = 1) -> bool:
        """Return whether so many KV slots and request slots are free, for ``requests`` in all."""
        return (
            self.free_kv_tokens >= kv_tokens
            and self.free_slots >= slots
            and self.free_window_tokens >= self._window_kv(kv_tokens, slots, requests)
        )

    def reclaim(self, kv_tokens: int, slots: int = 0, *, requests: int = 1) -> bool:
        """Retract offline requests until so much is free; return whether it is.

        If all of them together are not enough, none is retracted, unless the rest can come from
        offline requests of other micro-batches. O(offline requests).
        """
        if self.has_room(kv_tokens, slots, requests=requests):
            return True
        kv_short, slots_short = kv_tokens - self.free_kv_tokens, slots - self.free_slots
        window_short = self._window_kv(kv_tokens, slots, requests) - self.free_window_tokens
        victims: list[Request] = []
        for request in self._remaining_victims():
            if kv_short <= 0 and slots_short <= 0 and window_short <= 0:
                break
            victims.append(request)
            own_kv = self._own_kv(request)
            kv_short -= own_kv
            window_short -= min(own_kv, self._window_tokens)
            slots_short -= 1
        if kv_short > 0 or slots_short > 0 or window_short > 0:
            self.lacks_kv = True
            if 0 < kv_short <= self._kv_elsewhere:
                for request in victims:
                    self.retract(request, kv_tokens)
            return False
        for request in victims:
            self.retract(request, kv_tokens)
        return True

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
        self._retractions[request.info.rid] = Retraction(request.info.rid, tokens)
        # The pages that stay cached are freed on demand, so they count as free.
        self._take(-own_kv, -min(own_kv, self._window_tokens))
        self.free_slots += 1

    def shed(self, request: Request) -> None:
        """Refuse a waiting online request."""
        self._shed.append(request.info.rid)

    def late_decodes(self, seconds: float) -> int:
        """Return how many online decodes miss their TPOT target if their next token comes in
        ``seconds``. O(requests)."""
        end_s = self.snapshot.now_s + seconds
        return sum([due_s < end_s for due_s in self._due_s])

    # --- the plan ---

    @property
    def chunks(self) -> Sequence[PrefillChunk]:
        """The prefill chunks added so far, in order."""
        return tuple(self._chunks.values())

    @property
    def decoding(self) -> frozenset[str]:
        """The ids of the requests whose decodes were added so far."""
        return frozenset(self._decoding)

    def build(
        self,
        step: int,
        waiting_users: frozenset[str | None] | None = None,
        until_s: float = math.inf,
    ) -> StepPlan:
        """Return the plan: decodes not added pause, prefills not added are parked. O(requests).

        A decode that cannot pause is retracted instead. All but its last page stays in the prefix
        cache as long as there is room, so that little is computed again.
        """
        assert self.free_kv_tokens >= 0, f"KV over capacity by {-self.free_kv_tokens} tokens"
        if self.lane is Lane.OFFLINE and not self._decoding:
            self.skips_decodes = True
        pause: list[str] = []
        resume: list[str] = []
        park: list[str] = []
        retractions, decoding, skips_decodes = self._retractions, self._decoding, self.skips_decodes
        stays_as = _PAUSED if self.lane is Lane.OFFLINE else _DECODING
        for request in self.snapshot.admitted:
            rid, state = request.info.rid, request.state
            if rid in retractions:
                continue
            if state is _DECODING or state is _PAUSED:
                if skips_decodes or (state is stays_as and rid in decoding):
                    continue
                move = self._move(request)
                if move is _PAUSED:
                    pause.append(rid)
                elif move is _DECODING:
                    resume.append(rid)
                elif move is _WAITING:
                    self.retract(request, 0)
            elif state is _PREFILLING and rid not in self._chunks:
                park.append(rid)
        return StepPlan(
            step=step,
            lane=self.lane,
            until_s=until_s,
            shed=tuple(self._shed),
            retract=tuple(retractions.values()),
            pause=tuple(pause),
            resume=tuple(resume),
            park=tuple(park),
            prefills=tuple(self._chunks.values()),
            skips_decodes=self.skips_decodes,
            batch=self.stats,
            predicted_s=self.predicted_s,
            budget_s=self.offline_budget_s,
            expected=ExpectedResult(self.online_part_s, self.is_deadline_bound, waiting_users),
        )

    # --- inside ---

    def _move(self, request: Request) -> RequestState | None:
        """Return the state that a decode request enters; None if its state does not change."""
        is_added, is_paused = request.info.rid in self._decoding, request.state is _PAUSED
        if self.lane is Lane.OFFLINE:
            if is_added:
                return None if is_paused else _PAUSED
            return _WAITING if is_paused else None
        if is_paused:
            return _DECODING if is_added else None
        if is_added:
            return None
        return _PAUSED if request.info.can_pause else _WAITING

    def _sort_requests(self) -> None:
        online_decodes, offline_decodes = self.online_decodes, self.offline_decodes
        default_tpot_s = self.targets.tpot_s
        due_s = self._due_s
        is_alone = self.lane is Lane.OFFLINE
        num_steady = 0
        for request in self.snapshot.admitted:
            info, state, _, _, _, last_s = request
            if state is not _DECODING and state is not _PAUSED:
                prefills = (
                    self.online_prefills if info.request_class is _ONLINE else self.offline_prefills
                )
                # The engine runs one unfinished prefill at a time: it continues first.
                prefills.insert(0 if state is _PREFILLING else len(prefills), request)
            elif info.request_class is _ONLINE:
                online_decodes.append(request)
                tpot_s = info.tpot_target_s or default_tpot_s
                if tpot_s is not None:
                    due_s.append((info.arrival_s if last_s is None else last_s) + tpot_s)
            elif state is _PAUSED and not (self._rides and (info.can_pause or is_alone)):
                # One that cannot pause would have to be retracted whenever it does not fit.
                self.staying_decodes.append(request)
            elif info.can_pause:
                offline_decodes.append(request)
            else:
                offline_decodes.insert(num_steady, request)
                num_steady += 1
        self.tpot_slack_s = min(due_s, default=math.inf) - self.snapshot.now_s

    def _reserve_for_other_micro_batches(self) -> None:
        """Account for the other micro-batches: reserve KV for their next tokens, and bound this
        step by the TPOT targets of their online requests. O(requests elsewhere)."""
        requests = self.snapshot.elsewhere
        self.free_kv_tokens -= self.kv_to_decode(requests)
        online = [request for request in requests if request.info.is_online]
        self._has_online_elsewhere = bool(online)
        self._kv_elsewhere = sum(
            [self._own_kv(request) for request in requests if not request.info.is_online]
        )
        targets_s = [request.info.tpot_target_s or self.targets.tpot_s for request in online]
        self.elsewhere_s = min([s for s in targets_s if s is not None], default=math.inf)
        self.tpot_slack_s = min(self.tpot_slack_s, self.elsewhere_s)

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

    def _take(self, kv_tokens: int, window_tokens: int) -> None:
        self.free_kv_tokens -= kv_tokens
        if self._window_tokens:
            self.free_window_tokens -= window_tokens

    def _window_kv(self, kv_tokens: int, slots: int, requests: int) -> int:
        """Return how many slots of the sliding window's pool must be free for so much new KV.

        The engine cuts a chunk that does not fit, but leaves a page free behind it, and
        reserves a window for the output of each new request.
        """
        if not kv_tokens:
            return 0
        kv_tokens = max(kv_tokens + self._page_tokens, slots * self._window_tokens)
        return min(kv_tokens, requests * self._window_tokens)

    def _window_kv_of_prefill(self, tokens: int, kv_tokens: int) -> int:
        """Return the slots that a chunk takes of the sliding window's pool.

        The engine cuts a chunk rather than leave no slots to the decodes in the same step.
        """
        if not self._window_tokens:
            return 0
        left = self.free_window_tokens - self.kv_to_decode(self.offline_decodes)
        return max(min(tokens, left), min(kv_tokens, self._window_tokens))

    def _own_kv(self, request: Request) -> int:
        """Return the KV slots that only this request uses, in whole pages."""
        page = self._page_tokens
        return page * (-(-request.computed_tokens // page) - -(-request.cached_tokens // page))

    def _remaining_victims(self) -> Iterator[Request]:
        if self._victims is None:
            self._victims = self._victim_order(self)
        for request in self._victims:
            rid = request.info.rid
            if not (rid in self._retractions or rid in self._chunks or rid in self._decoding):
                yield request


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
