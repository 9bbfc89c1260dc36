"""A step: what the scheduler decides of it, and what came of it. Immutable values.

The scheduler answers an ``EngineSnapshot`` with a ``StepPlan``. The adapter carries it
out as far as the engine goes along, and hands a ``StepResult`` back: what really ran.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.snapshot import RequestInfo

__all__ = [
    "Eviction",
    "Expected",
    "JobTokens",
    "Lane",
    "PrefillChunk",
    "Served",
    "StepPlan",
    "StepResult",
]


class Lane(Enum):
    """Which rows a step has, and whether it can be suspended."""

    SHARED = "shared"
    """Online rows, and offline ones that ride along. Runs to its end."""

    OFFLINE = "offline"
    """Offline rows alone. Stops at a safepoint for what online requests need, and goes on from
    there later."""


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


@dataclass(frozen=True, slots=True)
class Expected:
    """What the scheduler compares a result with; nothing for an adapter."""

    online_part_s: float = 0.0
    """Predicted latency of the step's online work alone."""

    is_deadline_bound: bool = False
    """Online work was left out of the step because a deadline would be missed."""

    waiting_users: frozenset[str | None] | None = None
    """Users with online requests waiting at the time of the plan; None without a fair order."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does.

    Carried out in the order of the fields: first memory is freed, then rows
    change state, then the batch runs: every row in state ``DECODING`` (in the
    offline lane every offline row in state ``PAUSED``), after ``pause`` and ``resume``,
    decodes one token, unless ``skips_decodes``, and the chunks are prefilled.

    Two plans are different. One that ``resumes`` has the suspended step go on: it has the
    number of that step, is not started again, and changes no row. One that ``drops`` gives
    the suspended step up, and is followed by another plan at once.
    """

    step: int = 0
    """Its number, which its result refers to. A plan that is not started gives it back."""

    lane: Lane = Lane.SHARED
    resumes: bool = False
    drops: bool = False
    until_s: float = float("inf")
    """When a step of the offline lane must have been suspended, or have ended, at the latest."""

    shed: tuple[str, ...] = ()
    """Online requests to refuse: they can no longer meet their target (overload only)."""

    evict: tuple[Eviction, ...] = ()
    pause: tuple[str, ...] = ()
    """Decodes that skip steps from now on; KV kept. Offline ones, but for BROS."""

    resume: tuple[str, ...] = ()
    park: tuple[str, ...] = ()
    """Running prefills that get no chunk and give way from now on; KV kept."""

    prefills: tuple[PrefillChunk, ...] = ()
    """Chunks in order, online before offline; rows, waiting requests or queue picks."""

    skips_decodes: bool = False
    """No row decodes in this step; their states stay as they are."""

    batch: BatchStats = field(default_factory=BatchStats)
    """Sums over the planned batch."""

    predicted_s: float = 0.0
    """Predicted latency of the planned batch."""

    budget_s: float = float("inf")
    """Latency budget that offline work was packed under; infinite when nothing bounds it,
    0 when online work was left over, so that offline work got nothing."""

    expected: Expected = field(default_factory=Expected)

    @property
    def is_idle(self) -> bool:
        """True when there is nothing to run."""
        return self.batch.is_empty


class Served(NamedTuple):
    """An online request that a step computed tokens of."""

    info: RequestInfo
    last_token_s: float | None
    """When its token before came out; None when it had none."""

    token_s: float | None
    """When its token came out; None when none did, since more of its prompt is to be computed."""


class JobTokens(NamedTuple):
    """What a step computed for one job."""

    job: str | None
    """The batch; None: offline requests that are no lines of one."""

    tokens: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step that was started."""

    step: int | None
    """The number of its plan; None of a step that the engine took without one."""

    started_s: float
    """When it began: the time of its snapshot."""

    seconds: float | None = None
    """How long it took, as measured; None when that is not known."""

    batch: BatchStats = field(default_factory=BatchStats)
    """Sums over the rows that were computed; empty when nothing ran, or the step was dropped."""

    chunks: tuple[PrefillChunk, ...] = ()
    """The prefills among them."""

    served: tuple[Served, ...] = ()
    """The online requests among them."""

    given_up: tuple[str, ...] = ()
    """The rows of a suspended step that was dropped; its work is lost."""

    beside: tuple[BatchStats, ...] = ()
    """With a pipeline of K micro-batches, the batches of the K - 1 steps begun before this one and
    of the K - 1 begun after it, in order; empty where nothing ran. All shared its time."""

    jobs: tuple[JobTokens, ...] = ()
    """Whose the offline rows were; empty where nobody says."""

    planning_s: float = 0.0
    """Of ``seconds``, what went into deciding: an engine alone with its online requests has none of
    it. 0 also where that happens beside a batch that runs."""

    @property
    def has_offline(self) -> bool:
        """True when offline rows were computed."""
        rows = self.batch.decode_requests + self.batch.prefill_requests
        return rows > len(self.served)

    @property
    def concurrency(self) -> float:
        """How many steps ran at a time, on average: 1 without a pipeline."""
        return 1 + sum(not batch.is_empty for batch in self.beside) / 2
