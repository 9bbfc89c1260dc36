"""The scheduler's input: the state of the engine as immutable values.

An adapter (the engine's or the simulator's) builds an ``EngineSnapshot`` for each step; the
scheduler's answer is in ``core.step``.  Nothing here refers to a clock, a tensor or
an engine.

Token counts of a request: ``prompt_tokens + generated_tokens`` is its length; the
last generated token has no KV yet.  ``computed_tokens`` of the length have KV on
the device, so ``length - computed_tokens`` tokens are left to compute: 1 for a
decode, more for a prefill (also for a retracted request, which starts over with
its generated tokens appended to the prompt).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from sglang_coserve.core.request import RequestClass, RequestState
from sglang_coserve.core.step_stats import StepStats

_ONLINE: Final = RequestClass.ONLINE
"""Asked for of every request in every step, where looking up a member of an enum takes longer than
all the rest of ``is_online``."""


class RequestInfo(NamedTuple):
    """The properties of a request that do not change during its life."""

    rid: str
    request_class: RequestClass
    prompt_tokens: int
    max_new_tokens: int
    arrival_s: float
    ttft_target_s: float | None = None
    """Its own TTFT target; None to use the scheduler's."""

    tpot_target_s: float | None = None
    """Its own TPOT target; None to use the scheduler's."""

    job: str | None = None
    """The batch that an offline request is a line of, if it is."""

    can_pause: bool = True
    """False if the engine cannot pause it; it is then retracted where it would pause."""

    @property
    def is_online(self) -> bool:
        """True for the latency-critical class."""
        return self.request_class is _ONLINE


class Request(NamedTuple):
    """The state of one request at the time of the snapshot."""

    info: RequestInfo
    state: RequestState
    generated_tokens: int
    computed_tokens: int
    """Tokens with KV on the device; 0 while it waits."""

    cached_tokens: int = 0
    """For a waiting request: the tokens that the prefix cache or a checkpoint holds of it. For one
    that holds KV: how many of its first computed tokens other requests use too, so that retracting
    it does not free them."""

    last_token_s: float | None = None
    """When its last token came out; None before the first. Under overlap scheduling a plan is made
    while the last step runs: a token of that step is counted, comes out when the step ends
    (``EngineSnapshot.begins_s``), and has None here."""

    first_token_s: float | None = None
    """Time of its first token. None before the first token, and while the step that brings it
    runs."""

    @property
    def length_tokens(self) -> int:
        """Prompt and generated tokens."""
        return self.info.prompt_tokens + self.generated_tokens

    @property
    def tokens_to_compute(self) -> int:
        """Tokens to compute before its next output token; at least 1."""
        have = self.computed_tokens or self.cached_tokens
        return max(1, self.length_tokens - have)


@dataclass(frozen=True, slots=True)
class ChunkRules:
    """The pieces in which the engine computes prompts."""

    may_cut: bool = True
    """False if a prompt is computed whole, and in no step with decodes. The engine then computes
    one prompt that has more tokens than a step may have."""

    align_tokens: int = 1
    """Tokens of a piece that does not end its prompt are a multiple of this number, from 1."""

    @property
    def are_coarse(self) -> bool:
        """True if a step may have too little time for the shortest piece."""
        return not self.may_cut or self.align_tokens > 1

    def shortest_piece(self, rest_tokens: int) -> int:
        """Return the fewest tokens in which a prompt with so many left can be continued."""
        return min(rest_tokens, self.align_tokens) if self.may_cut else rest_tokens


FINE_CHUNKS: Final = ChunkRules()
"""Rules of an engine that cuts prompts at any page."""


@dataclass(frozen=True, slots=True)
class SuspendedStep:
    """A step of the offline lane that is suspended at a safepoint, from which it can be resumed.

    Its requests are not among those of the snapshot, and the KV that they hold is not free.
    """

    step: int
    """The number of its plan."""

    batch: StepStats
    done_share: float
    """Share of its layers that has been computed, 0 to 1."""

    since_s: float
    """When it was suspended last."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The state of the engine between two steps."""

    now_s: float
    admitted: Sequence[Request]
    """Requests that hold KV: prefilling, parked, decoding, paused; in order of admission."""

    waiting: Sequence[Request]
    """Online requests without KV, in the order in which they are served: by priority where the
    engine knows any, else by arrival. Offline ones wait in ``OfflineQueue``."""

    free_kv_tokens: int
    """Unused KV slots."""

    evictable_kv_tokens: int
    """KV slots that only the prefix cache uses; the engine frees them on demand."""

    free_slots: int
    """Requests that can still be admitted (SGLang's request pool)."""

    max_batch_tokens: int
    """Most tokens of a step with prompts, those of its decodes included: the engine's buffers have
    this size. A step of decodes alone may have more."""

    chunk_rules: ChunkRules = FINE_CHUNKS
    """The pieces in which prompts are computed."""

    page_tokens: int = 1
    """KV is allocated in pages of this many tokens."""

    keeps_prefixes: bool = True
    """False without a prefix cache: no request can reuse the KV of another."""

    window_tokens: int = 0
    """If layers with a sliding window have a separate KV pool: the most slots that a request
    holds there between two steps. Each token takes a slot of both pools, and frees its slot here
    once it is behind the window. 0 if there is only one pool."""

    free_window_tokens: int = 0
    """Slots of the sliding window's pool that are free or that the engine frees on demand."""

    elsewhere: tuple[Request, ...] = ()
    """With pipeline parallelism, the requests of the other micro-batches. A plan cannot change
    them, but its step delays theirs, and they need KV for their next token."""

    suspended: SuspendedStep | None = None
    """The suspended step, of which there is at most one."""

    stop_share: float = 1.0
    """Largest share of an offline-lane step that runs until it can be suspended. 1 if steps cannot
    be suspended; there is no offline lane then."""

    decodes_stop: bool = True
    """False if an offline-lane step without prefills cannot be suspended, e.g. because it is a
    single CUDA graph."""

    resume_s: float = 0.0
    """Assumed cost of suspending and resuming a step, in seconds, until a suspended step has shown
    it."""

    ahead_s: float = 0.0
    """Predicted rest of the step that runs, in seconds: under overlap scheduling the next one is
    planned beside it, and begins when it ends."""

    @property
    def begins_s(self) -> float:
        """When the planned step begins."""
        return self.now_s + self.ahead_s


class PrefixCache(Protocol):
    """The queries to the engine's prefix cache that planning needs."""

    def cached_tokens(self, rid: str) -> int | None:
        """Return how many leading tokens of a waiting offline request the cache holds.

        None while more of its KV is being loaded onto the device, until when it cannot be admitted.
        """
        ...
