"""The plan and the result of a step, as immutable values.

The scheduler answers an ``EngineSnapshot`` with a ``StepPlan``. The adapter carries it
out as far as the engine permits, and returns a ``StepResult`` with what really ran.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.core.step_stats import StepStats


class Lane(Enum):
    """The kind of a step: which requests it may have, and whether it can be suspended."""

    SHARED = "shared"
    """Online requests, and offline requests beside them. Always runs to its end."""

    OFFLINE = "offline"
    """Offline requests only. May be suspended at a safepoint for online work, and resumed there
    later."""


class Bound(Enum):
    """The reason for the limit on a step's offline work.

    docs/metrics.md names the functions that give each reason.
    """

    NONE = "none"
    """No limit: no online request is there, or no target applies."""

    BUDGET = "budget"
    """A fixed time per step: ``--iteration-budget-ms``, or a paper's own rule."""

    GAP = "gap"
    """The next tokens of online decodes are due, by the pace or a target of their streams."""

    PROMPT = "prompt"
    """The first token of an online prompt is due, in this step or after it."""

    PROMPTS_WAIT = "prompts_wait"
    """Online prompts are in the step or wait: offline work may delay their first tokens no more."""

    ARRIVAL = "arrival"
    """An online request may arrive during the step, and wait for its end."""

    LEAST_PIECE = "least_piece"
    """The time is for the shortest piece of a prompt, where arrivals may wait even less."""

    LEAST_STEP = "least_step"
    """The time is for the shortest step that is more than fixed cost. No online request is there,
    and an arrival may have to wait longer than it should."""

    SUSPENDED = "suspended"
    """A suspended step can go on before the next tokens of online decodes are due."""

    PROMPTS_FIRST = "prompts_first"
    """Online prompts are computed without decodes, as SGLang does."""

    PROMPT_LEFT = "prompt_left"
    """An online prompt was cut or left over: offline work would delay it further."""

    KV = "kv"
    """Online prompts would lack KV, because offline work has slowed the decodes that hold it."""

    LANE = "lane"
    """Offline steps alone, until their next safepoint."""


class PromptStop(Enum):
    """The reason why a step does not have all of the online prompts."""

    MEMORY = "memory"
    """The next prompt finds too little KV memory, or no place among the requests."""

    PACE = "pace"
    """Streams or a fixed time per step leave no time for more of the prompt."""

    FULL = "full"
    """The step has as many tokens as a step may have."""


class PrefillChunk(NamedTuple):
    """The next ``tokens`` prompt tokens of a request to compute: the rest of it, or a part."""

    rid: str
    tokens: int


class Retraction(NamedTuple):
    """Release the KV of the last ``tokens`` tokens of a request, and let it wait.

    It keeps its generated tokens; the KV of its first tokens goes to the prefix cache.
    """

    rid: str
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does.

    It is carried out in the order of the fields: memory is freed, requests change state, and the
    batch runs. After ``pause`` and ``resume``, every request in state ``DECODING`` (in the
    offline lane every offline request in state ``PAUSED``) decodes one token, unless
    ``skips_decodes``; the chunks are prefilled in the same batch.

    There are two special plans. One with ``resumes`` resumes the suspended step: it has the
    number of that step, is not started again, and changes no request. One with ``drops`` discards
    the suspended step, and another plan is made at once.
    """

    step: int = 0
    """Number that the result refers to. The number of a plan that is not started is used again."""

    lane: Lane = Lane.SHARED
    resumes: bool = False
    drops: bool = False
    until_s: float = float("inf")
    """Time by which a step of the offline lane must have ended or been suspended."""

    shed: tuple[str, ...] = ()
    """Online requests to refuse, as they can no longer meet their target (``Overload.SHED``)."""

    retract: tuple[Retraction, ...] = ()
    pause: tuple[str, ...] = ()
    """Decodes that skip steps from now on and keep their KV. Only BROS pauses online ones."""

    resume: tuple[str, ...] = ()
    park: tuple[str, ...] = ()
    """Running prefills that skip steps from now on and keep their KV."""

    prefills: tuple[PrefillChunk, ...] = ()
    """Chunks in order, online before offline: of admitted, waiting and queued requests."""

    skips_decodes: bool = False
    """If true, no request decodes in this step, and decodes keep their state."""

    batch: StepStats = field(default_factory=StepStats)
    """Sums over the planned batch."""

    predicted_s: float = 0.0
    """Predicted latency of the planned batch."""

    budget_s: float = float("inf")
    """Longest time, in seconds, that the batch may take with offline work in it. Infinite without
    a limit. 0 if offline work must not run."""

    bound_by: Bound = Bound.NONE
    """The reason for ``budget_s``."""

    prompt_stop: PromptStop | None = None
    """The reason why the first online prompt that is left over, or cut, is not whole in this step.
    None if all prompts are, or if the policy does not say."""

    # The rest is for ``Scheduler.update``; adapters ignore it.
    online_part_s: float = 0.0
    """Predicted latency of the step's online work alone."""

    is_deadline_bound: bool = False
    """Online work was left out of the step because a deadline would be missed."""

    added_s: float = 0.0
    """How much later than without offline work the step makes first tokens: its online prompts',
    and that of a request that arrives during the step."""

    waits_online: bool = False
    """Online prompts waited when it was planned."""

    @property
    def is_idle(self) -> bool:
        """True when there is nothing to run."""
        return self.batch.is_empty


class ServedRequest(NamedTuple):
    """An online request that took part in a step."""

    info: RequestInfo
    token_s: float | None
    """Time of its token in this step; None if more of its prompt is still to be computed."""


class JobTokens(NamedTuple):
    """What a step computed for one job."""

    job: str | None
    """The batch; None: offline requests that are no lines of one."""

    tokens: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step that was started."""

    step: int | None
    """The number of its plan; None for a step that the engine ran without one."""

    started_s: float
    """When it began, i.e. the time of its snapshot."""

    seconds: float | None = None
    """Measured duration; None if unknown."""

    batch: StepStats = field(default_factory=StepStats)
    """Sums over the requests computed; empty if nothing ran or the step was dropped."""

    chunks: tuple[PrefillChunk, ...] = ()
    """The prefill chunks computed."""

    served: tuple[ServedRequest, ...] = ()
    """The online requests of the step."""

    dropped: tuple[str, ...] = ()
    """The requests of a suspended step that was dropped, whose work is lost."""

    overlapping: tuple[StepStats, ...] = ()
    """With a pipeline of K micro-batches, the batches of the K - 1 steps begun before this one and
    of the K - 1 begun after it, in order; an entry is empty if its step ran nothing. All of them
    overlapped with this step."""

    jobs: tuple[JobTokens, ...] = ()
    """Whose the offline requests were; empty where nobody says."""

    suspensions: int = 0
    """How often it was suspended and resumed; the cost of that is part of ``seconds``."""

    planning_s: float = 0.0
    """Of ``seconds``, what went into deciding: an engine alone with its online requests has none of
    it. 0 also where that happens beside a batch that runs."""

    @property
    def online_chunks(self) -> list[PrefillChunk]:
        """The prefill chunks of online requests. O(online requests) if there are any chunks."""
        if not self.chunks:
            return []
        online = {served.info.rid for served in self.served}
        return [chunk for chunk in self.chunks if chunk.rid in online]

    @property
    def num_online_decodes(self) -> int:
        """How many online requests decoded. O(online requests) if there are any chunks."""
        return len(self.served) - len(self.online_chunks)

    @property
    def has_offline(self) -> bool:
        """True when offline requests were computed."""
        requests = self.batch.decode_requests + self.batch.prefill_requests
        return requests > len(self.served)

    @property
    def concurrency(self) -> float:
        """Average number of steps that ran at the same time; 1 without a pipeline."""
        return 1 + sum(not batch.is_empty for batch in self.overlapping) / 2
