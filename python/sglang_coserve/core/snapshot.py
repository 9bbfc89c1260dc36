"""What the scheduler sees and what it decides: immutable values.

An adapter (the engine's or the simulator's) builds an ``EngineSnapshot`` once an
iteration; the scheduler answers with a ``StepPlan``; the adapter carries it out
and reports what happened.  Nothing here refers to a clock, a tensor or an engine.

Token counts of a request: ``prompt_tokens + generated_tokens`` is its length; the
last generated token has no KV yet.  ``computed_tokens`` of the length have KV on
the device, so ``length - computed_tokens`` tokens are left to compute: 1 for a
decode, more for a prefill (also for one that was evicted and starts over with
its generated tokens behind the prompt).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.request import RequestClass, RequestState

__all__ = [
    "EngineSnapshot",
    "Eviction",
    "FairnessUpdate",
    "FirstToken",
    "PrefillChunk",
    "PrefixCache",
    "RequestInfo",
    "Row",
    "StepPlan",
]


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What does not change while a request lives."""

    rid: str
    request_class: RequestClass
    prompt_tokens: int
    max_new_tokens: int
    arrival_s: float
    ttft_target_s: float | None = None
    """Its own TTFT target; None: the scheduler's."""

    tpot_target_s: float | None = None
    """Its own TPOT target; None: the scheduler's."""

    user: str | None = None
    """Whom fairness counts it for: a key or a user name."""

    seen_s: float | None = None
    """When the scheduler could first take it into account: at the end of the iteration that ran
    when it arrived. None: on arrival."""

    can_pause: bool = True
    """False when the engine cannot skip iterations of it, or evict it, without loss."""

    @property
    def is_online(self) -> bool:
        """True for the latency-critical class."""
        return self.request_class is RequestClass.ONLINE


class Row(NamedTuple):
    """One request as it stands at the time of the snapshot."""

    info: RequestInfo
    state: RequestState
    generated_tokens: int
    computed_tokens: int
    """Tokens with KV on the device; 0 while it waits."""

    cached_tokens: int = 0
    """For a waiting row: the tokens the prefix cache, or a checkpoint, would give it. For one
    that holds KV: how many of the leading computed ones other rows use too, so that evicting
    this row does not free them."""

    last_token_s: float | None = None
    """When its last token came out; None before the first."""

    @property
    def length_tokens(self) -> int:
        """Prompt and generated tokens."""
        return self.info.prompt_tokens + self.generated_tokens

    @property
    def tokens_to_compute(self) -> int:
        """Tokens without KV that its next output token needs."""
        have = self.computed_tokens or self.cached_tokens
        return max(1, self.length_tokens - have)


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine between two iterations."""

    now_s: float
    rows: Sequence[Row]
    """Requests that hold KV: prefilling, parked, decoding, paused; in order of admission."""

    waiting: Sequence[Row]
    """Online requests without KV, in order of arrival. Offline ones wait in the core's queue."""

    free_kv_tokens: int
    """KV slots that nothing holds."""

    evictable_kv_tokens: int
    """KV slots that only the prefix cache holds; the engine frees them on demand."""

    free_slots: int
    """Requests that can still be admitted (SGLang's request pool)."""

    max_batch_tokens: int
    """Most tokens one iteration may compute, prefill and decode together."""

    page_tokens: int = 1
    """KV is allocated in pages of this many tokens."""

    arrival_wait_share: float = 1.0
    """Part of an iteration without online rows that a request which arrives in it has to wait at
    most; below 1 where the iteration can be aborted at a safepoint."""

    mixed_arrival_wait_share: float = 1.0
    """The same of an iteration with online decodes; below 1 where they go on when the offline
    rows are given up."""


class PrefixCache(Protocol):
    """The engine's prefix cache, as far as a plan needs it."""

    def cached_tokens(self, rid: str) -> int:
        """Return how many leading tokens of a waiting offline request the cache holds."""
        ...


class PrefillChunk(NamedTuple):
    """The next ``tokens`` tokens of a request to compute; all of its rest, or a chunk."""

    rid: str
    tokens: int


class Eviction(NamedTuple):
    """Give up the KV of the last ``tokens`` tokens of a request.

    Of a decode or a prefill this makes a waiting request with progress; what is
    left, the head, goes to the prefix cache.
    """

    rid: str
    tokens: int


class FirstToken(NamedTuple):
    """An online request that is about to get its first token."""

    arrival_s: float
    seen_s: float


class OnlineGaps(NamedTuple):
    """Online decodes that get their next token."""

    decodes: int = 0
    late: int = 0
    """Of them, those whose TPOT target the gap since their last token is to exceed."""


@dataclass(frozen=True, slots=True)
class FairnessUpdate:
    """How the fairness counters stand once a plan is carried out."""

    counters: Mapping[str | None, float]
    """Of the users whose counter changes."""

    waiting_users: frozenset[str | None]
    """Users with online requests waiting at the time of the snapshot."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next iteration does.

    Carried out in the order of the fields: first memory is freed, then rows
    change state, then the batch runs: every row in state ``DECODING`` (after
    ``pause`` and ``resume``) decodes one token, unless ``skips_decodes``, and the
    chunks are prefilled.
    """

    shed: tuple[str, ...] = ()
    """Online requests to refuse: they can no longer meet their target (overload only)."""

    evict: tuple[Eviction, ...] = ()
    pause: tuple[str, ...] = ()
    """Decodes that skip iterations from now on; KV kept. Offline ones, but for BROS."""

    resume: tuple[str, ...] = ()
    park: tuple[str, ...] = ()
    """Running prefills that get no chunk and give way from now on; KV kept."""

    prefills: tuple[PrefillChunk, ...] = ()
    """Chunks in order, online before offline; rows, waiting requests or queue picks."""

    skips_decodes: bool = False
    """No row decodes in this iteration; their states stay as they are."""

    now_s: float = 0.0
    """Of the snapshot."""

    batch: BatchStats = field(default_factory=BatchStats)
    """Sums over the planned batch."""

    predicted_s: float = 0.0
    """Predicted latency of the planned batch."""

    budget_s: float = float("inf")
    """Latency budget that offline work was packed under; infinite when nothing bounds it,
    0 when online work was left over, so that offline work got nothing."""

    is_deadline_bound: bool = False
    """True when online work was left out of the batch because a deadline would be missed."""

    online_part_s: float = 0.0
    """Predicted latency of the batch's online work alone."""

    arrival_wait_s: float = float("inf")
    """Longest time that an online request which arrives while this runs may wait for its end;
    where it would take longer, the offline part is to be aborted."""

    first_tokens: tuple[FirstToken, ...] = ()
    """Of the online requests that this batch gives their first token."""

    gaps: OnlineGaps = field(default_factory=OnlineGaps)
    """Between the tokens of those that decode and have a TPOT target."""

    fairness: FairnessUpdate | None = None
    """What ``commit`` does to the fairness counters; None without a fair order."""

    @property
    def is_idle(self) -> bool:
        """True when there is nothing to run."""
        return self.batch.is_empty
