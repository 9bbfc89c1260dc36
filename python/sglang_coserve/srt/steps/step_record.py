"""The record of a step: one immutable value with everything that observers may ask.

``StepTracker`` makes it, in the only loop over the requests of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.core.step import StepPlan, StepResult
from sglang_coserve.srt.forward_kind import ForwardKind


class Reception(NamedTuple):
    """The way of a request to the scheduler's queue. Times are in seconds, of this machine."""

    sent_s: float | None
    """Time at which the HTTP server's process sent it, with its text and media prepared. None if
    unknown."""

    compiled_from_s: float | None
    """Time at which the scheduler received it and looked for its grammar, which was compiled until
    ``queued_s`` unless it was known. None without a grammar."""

    queued_s: float


class StepRequest(NamedTuple):
    """A request of a step. Times are in seconds, of this rank."""

    info: RequestInfo
    token_s: float | None
    """Time of its token in this step; None without a token."""

    last_s: float | None
    """Time of its token before this step; None before its first token."""

    prompt_tokens: int = 0
    """Prompt tokens that the step computed; 0 for a decode."""

    context_tokens: int = 0
    """Tokens before these prompt tokens, all with KV; 0 for a decode."""

    recomputed_tokens: int = 0
    """Prompt tokens, of those computed, that an earlier step had computed already."""

    reception: Reception | None = None
    """Its way to this step, which is its first; None in later steps."""

    is_last: bool = False
    """True if the request has ended with this step."""


class Suspension(NamedTuple):
    """A suspension of a step. Times are in seconds."""

    layer: int
    """The first layer that had not run."""

    stopped_s: float
    resumed_s: float
    """Time at which the step went on, or was dropped."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that the engine has run, or has suspended and dropped.

    Times are in seconds, of this rank. The times in ``result`` are the same on all ranks.
    """

    result: StepResult
    """The part from which the core learns."""

    plan: StepPlan | None = None
    """The plan of the step; None if SGLang alone composed the step."""

    kind: ForwardKind | None = None
    """The kind of its batch; None if nothing ran, or if the batch has no ``ForwardKind``."""

    launched_s: float = 0.0
    """Time at which the host began to launch its batch, for the first time if it was suspended."""

    ended_s: float = 0.0
    """Time at which its results came, or at which it was dropped."""

    paced_s: float = 0.0
    """Time for which the host held its launch back, so that it could have newer requests."""

    online: tuple[StepRequest, ...] = ()
    """Its online requests, without requests that were aborted before its results came."""

    offline: tuple[StepRequest, ...] = ()
    """Its offline requests, without aborted ones. In the record of a dropped step decodes are
    missing, and ``prompt_tokens`` are lost."""

    first: tuple[StepRequest, ...] = ()
    """Requests that got a token in this step, their first in this engine."""

    suspensions: tuple[Suspension, ...] = ()
    left: tuple[RequestInfo, ...] = ()
    """Requests that have left the engine since the record before this one."""

    @property
    def requests(self) -> tuple[StepRequest, ...]:
        """Its requests of both classes. O(requests)."""
        return self.online + self.offline

    @property
    def prompts(self) -> Sequence[StepRequest]:
        """Its requests with prompt tokens. O(requests) if there are any, else O(1)."""
        if not self.result.batch.prefill_requests and not self.is_dropped:
            return ()
        return [request for request in self.requests if request.prompt_tokens]

    @property
    def is_dropped(self) -> bool:
        """True if the step was suspended and then dropped: its work is lost."""
        return bool(self.result.dropped)
