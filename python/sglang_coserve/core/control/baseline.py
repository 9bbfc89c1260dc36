"""The no-interference baseline: when online tokens would have come without offline work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, NamedTuple, TypeVar

from sglang_coserve.core.control.shadow_kv import ShadowKv
from sglang_coserve.core.control.slo_monitor import TokenTimes
from sglang_coserve.core.prefix_tree import Node
from sglang_coserve.core.step_stats import StepStats

_MOST_WAIT_S: Final = 60.0
"""Longest that the clock stands still for one request. Between two of a request's tokens the real
engine takes less, even where it retracts requests; what takes longer is no latency to compare."""


@dataclass(frozen=True, slots=True)
class EngineSize:
    """Limits of an engine; the defaults are SGLang's usual chunk size and unbounded memory."""

    chunk_tokens: int = 8192
    """Most prompt tokens in a step."""

    max_requests: int = 1 << 20
    """Most requests that hold KV at a time."""

    kv_tokens: int = 1 << 40
    """Most tokens with KV at a time."""

    mixes_decodes: bool = False
    """Decodes run in the same step as prompts, instead of after them."""

    page_tokens: int = 1
    """KV is allocated in pages of this many tokens."""

    keeps_prefixes: bool = True
    """False without a prefix cache: no request finds the KV of another."""

    overlaps: bool = False
    """Each step is planned when the one before it begins."""

    micro_batches: int = 1
    """Micro-batches in flight at a time; more than one with pipeline parallelism."""

    @property
    def share(self) -> EngineSize:
        """What each micro-batch has: a part of the requests and of the KV."""
        count = self.micro_batches
        return replace(
            self,
            max_requests=max(self.max_requests // count, 1),
            kv_tokens=max(self.kv_tokens // count, 1),
            micro_batches=1,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class BaselineRequest(TokenTimes):
    """A request, with the times of its tokens and its KV without offline work."""

    arrival_s: float
    prompt_left_tokens: int
    """Prompt tokens still to be computed, at first the whole prompt."""

    token_ids: bytes = b""
    """Its prompt, packed (``pack_tokens``); once it has ended, its output, too. Empty if unknown:
    the request then shares no prefix."""

    context_tokens: int = 0
    """Tokens with KV."""

    found_tokens: int | None = None
    """Prompt tokens that were in the cache when the request began; None until then, and if its
    token ids were unknown."""

    lock: Node | None = None
    """End of its prefix in the cache; None while it holds no KV."""

    known_tokens: int = 0
    """Output tokens that the real engine has generated."""

    has_ended: bool = False
    """The real request has ended: no token comes after the known ones."""

    is_in: bool = False
    """It is in the baseline: neither given up nor through."""

    @property
    def has_all(self) -> bool:
        """True when the baseline has generated every token that the request ever gets."""
        return self.has_ended and self.tokens >= self.known_tokens


R = TypeVar("R", bound=BaselineRequest)


class BaselineStep(NamedTuple, Generic[R]):
    """What came of a step of the baseline."""

    end_s: float
    """When its tokens come."""

    decoded: Sequence[R]
    """Those that got another token."""

    before_s: Sequence[float]
    """When each of them got the one before."""

    first: Sequence[R]
    """Those that got their first token."""

    complete: Sequence[R]
    """Those of both that ``has_all`` is true of now."""


class Baseline(Generic[R]):
    """Simulates an engine that serves only the online requests of the real one.

    It runs the steps that SGLang would run: prompts in order of arrival up to the chunk size,
    without decodes unless they are mixed; if no prompt waits, every decode. A latency model
    gives the duration of each step. Under overlap scheduling the next step is planned when a step
    begins, so a request that arrives during the step waits for both. The length of an output is
    known only once the real engine has generated it, so a decode step is delayed until all the
    tokens that it would produce are known. The real engine serves the same requests and more, so it
    lags behind, and the delay is short: mostly the step that the real engine is running. A request
    without news for a minute is given up, because it would stop the simulation of all others.

    Requests find the prefixes that online requests alone would have left in the cache
    (``ShadowKv``), whatever offline work has evicted from the real cache.

    Each simulated step costs O(its requests); amortized, there is one for each real step with
    online requests.
    """

    def __init__(self, size: EngineSize, kv: ShadowKv | None = None) -> None:
        """Start without requests. ``kv`` is shared by the micro-batches of an engine."""
        assert min(size.chunk_tokens, size.max_requests, size.kv_tokens) > 0
        self._size = size
        self._kv = kv or shadow_kv(size)
        self._clock_s = 0.0
        self._began_s = 0.0
        """When the last step began."""

        self._num_requests = 0
        self._waiting: deque[R] = deque()
        """In order of arrival; the first may be partly computed."""

        self._decoding: list[R] = []
        """A new list after each change, so that a step keeps those that it had."""

        self._num_begun = 0
        """Requests that hold KV."""

        self._awaited: R | None = None
        self._awaited_since_s = 0.0
        """Since when the decodes cannot go on without this request's next token."""

        self._gone: list[R] = []
        """Requests to remove: given up, or with every token that they ever get."""

    def __len__(self) -> int:
        return self._num_requests

    @property
    def num_decodes(self) -> int:
        """How many of its requests decode."""
        return len(self._decoding)

    def arrived(self, request: R) -> None:
        """Add an online request, a new one; to be called in order of arrival. O(1)."""
        request.is_in = True
        self._num_requests += 1
        self._waiting.append(request)

    def ended(self, request: R) -> None:
        """Record that the real request has ended: no more tokens of it follow. O(1)."""
        request.has_ended = True
        if request.is_in and request.has_all:
            self._gone.append(request)

    def drop(self, request: R) -> None:
        """Forget a request that the real engine dropped. O(1)."""
        if request.is_in:
            self._leave(request)
            self._gone.append(request)

    def _leave(self, request: R) -> None:
        self._num_requests -= request.is_in
        request.is_in = False

    def advance(self, predict: Callable[[StepStats], float], now_s: float) -> list[BaselineStep[R]]:
        """Run and return the steps that start by ``now_s``, as far as their tokens are known.

        Every request that arrived by then has been added; ``predict`` returns the duration of a
        step in seconds.
        """
        steps: list[BaselineStep[R]] = []
        while self._step(predict, now_s, steps):
            pass
        return steps

    def _step(
        self, predict: Callable[[StepStats], float], now_s: float, steps: list[BaselineStep[R]]
    ) -> bool:
        """Run one step and append it; return False when none can be run yet."""
        self._drop_ended()
        start_s = self._clock_s
        if not self._decoding:
            if not self._waiting:
                return False
            start_s = max(start_s, self._waiting[0].arrival_s)
        if start_s > now_s:
            return False
        # An idle engine plans at once.
        plans_early = self._size.overlaps and self._decoding and start_s == self._clock_s
        chunks = self._chunks(self._began_s if plans_early else start_s)
        if chunks is None:
            return self._gives_up(next(filter(_may_have_ended, self._decoding)), now_s)
        decodes = self._decoding if self._size.mixes_decodes or not chunks else []
        keys = len(decodes)
        for decode in decodes:
            if decode.tokens >= decode.known_tokens:
                return self._gives_up(decode, now_s)
            keys += decode.context_tokens
        stats = StepStats(decode_requests=len(decodes), decode_context_tokens=keys)
        for request, count in chunks:
            stats = stats.with_prefill(count, request.context_tokens)
        if stats.is_empty:
            return False  # The first prompt waits for memory that a running request holds.
        if decodes:
            self._awaited = None
        self._began_s, self._clock_s = start_s, (end_s := start_s + predict(stats))
        before_s = [decode.last_s for decode in decodes]
        self._kv.generated(len(decodes))
        for decode in decodes:
            decode.context_tokens += 1
            decode.tokens += 1
            decode.last_s = end_s
        first: list[R] = []
        for request, count in chunks:
            request.context_tokens += count
            request.prompt_left_tokens -= count
            if request.prompt_left_tokens == 0:
                self._waiting.popleft()
                self._kv.share(request)
                request.came(end_s)
                first.append(request)
        complete = [one for one in (*decodes, *first) if one.has_ended and one.has_all]
        self._gone += complete
        self._decoding = [*self._decoding, *first] if first else self._decoding
        steps.append(BaselineStep(end_s, decodes, before_s, first, complete))
        return True

    def _gives_up(self, awaited: R, now_s: float) -> bool:
        """Give up all that is awaited if the first has been for too long; else return False.

        O(1) until then; then O(requests), as others may have been awaited behind it.
        """
        if awaited is not self._awaited:
            self._awaited, self._awaited_since_s = awaited, now_s
        if now_s - self._awaited_since_s <= _MOST_WAIT_S:
            return False
        for request in list(filter(_may_have_ended, self._decoding)):
            self.drop(request)
        return True

    def _drop_ended(self) -> None:
        """Remove requests that get no more tokens.

        O(1) if there are none, else O(decodes); O(waiting), too, if one of them still waits.
        """
        if not self._gone:
            return
        for request in self._gone:
            self._leave(request)
            self._num_begun -= request.lock is not None
            self._kv.release(request, self._clock_s)
        if any(request.prompt_left_tokens for request in self._gone):
            self._waiting = deque(request for request in self._waiting if request.is_in)
        self._gone.clear()
        self._decoding = [decode for decode in self._decoding if decode.is_in]

    def _chunks(self, planned_s: float) -> list[tuple[R, int]] | None:
        """Return the prompts of a step that is planned at ``planned_s``, with the tokens of each.

        None while a prompt needs the slot or memory of a request that may have ended.
        """
        chunks: list[tuple[R, int]] = []
        if not self._waiting or self._waiting[0].arrival_s > planned_s:
            return chunks
        budget = self._size.chunk_tokens
        num_requests = len(self._decoding)
        for request in self._waiting:
            if budget == 0 or request.arrival_s > planned_s:
                break
            if num_requests == self._size.max_requests or not self._begin(request, planned_s):
                return None if any(map(_may_have_ended, self._decoding)) else chunks
            count = min(budget, request.prompt_left_tokens)
            chunks.append((request, count))
            budget -= count
            num_requests += 1
        return chunks

    def _begin(self, request: R, planned_s: float) -> bool:
        """Give a request its KV, if it has none yet; return False if there is too little room."""
        if request.lock is not None:
            return True
        self._num_begun += self._kv.begin(request, planned_s, must_fit=self._num_begun > 0)
        request.found_tokens = request.context_tokens if request.token_ids else None
        return request.lock is not None


def shadow_kv(size: EngineSize) -> ShadowKv:
    """Return the empty KV of an engine."""
    return ShadowKv(size.kv_tokens, size.page_tokens, keeps_prefixes=size.keeps_prefixes)


def _may_have_ended(request: BaselineRequest) -> bool:
    return request.tokens >= request.known_tokens and not request.has_ended
