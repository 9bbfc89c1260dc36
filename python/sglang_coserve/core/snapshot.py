"""What the scheduler sees: immutable values.

An adapter (the engine's or the simulator's) builds an ``EngineSnapshot`` once a step;
what follows from it is in ``core.step``.  Nothing here refers to a clock, a tensor or
an engine.

Token counts of a request: ``prompt_tokens + generated_tokens`` is its length; the
last generated token has no KV yet.  ``computed_tokens`` of the length have KV on
the device, so ``length - computed_tokens`` tokens are left to compute: 1 for a
decode, more for a prefill (also for one that was evicted and starts over with
its generated tokens behind the prompt).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.request import RequestClass, RequestState

__all__ = ["EngineSnapshot", "PrefixCache", "RequestInfo", "Row", "SuspendedStep"]


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

    job: str | None = None
    """The batch that an offline request is a line of, if it is."""

    can_pause: bool = True
    """False when the engine cannot skip steps of it: where a decode would pause, it is evicted."""

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
class SuspendedStep:
    """A step of the offline lane that stopped at a safepoint and can go on from there.

    Its rows are not among those of the snapshot, and the KV that they hold is not free.
    """

    step: int
    """The number of its plan."""

    batch: BatchStats
    done_share: float
    """Part of its layers that has been computed, 0 to 1."""


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

    keeps_prefixes: bool = True
    """False without a prefix cache: what one request has computed is no other's."""

    window_tokens: int = 0
    """Where layers with a sliding window keep their KV in a pool of its own: the slots that a
    request holds there at most between two steps. Each token takes one slot of either pool, and
    leaves its slot here behind the window. 0 where there is one pool."""

    free_window_tokens: int = 0
    """Slots of that pool that are free or that the engine frees on demand."""

    elsewhere: tuple[Row, ...] = ()
    """With pipeline parallelism, requests that run in other micro-batches. A plan cannot change
    them, but its step delays theirs, and they need KV for their next token."""

    suspended: SuspendedStep | None = None
    """At most one step is suspended."""

    stop_share: float = 1.0
    """Part of a step of the offline lane that passes at most until it can be suspended; 1 where
    steps cannot be suspended: then there is no offline lane."""

    decodes_stop: bool = True
    """False where a step of the offline lane that prefills nothing runs to its end: on a GPU it may
    be a single CUDA graph."""

    resume_s: float = 0.0
    """What it costs to suspend a step and go on with it."""


class PrefixCache(Protocol):
    """The engine's prefix cache, as far as a plan needs it."""

    def cached_tokens(self, rid: str) -> int:
        """Return how many leading tokens of a waiting offline request the cache holds."""
        ...
