"""What a run brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_coserve.metrics import Outcome, RequestTimeline, throughput


@dataclass(slots=True)
class RunOutcome:
    """What a run brought, in seconds of CPU time."""

    online: Sequence[RequestTimeline]
    """In the order of their arrival. One that failed was refused."""

    seconds: float
    offline_tokens_per_s: float
    """Prompt tokens of requests that had their first token, and output tokens."""

    num_unfinished: int = 0
    """Online requests that did not end."""

    counters: dict[str, int] = field(default_factory=dict)
    """What became of offline requests since the engine began, as in ``/coserve/status``."""

    busy_s: float = 0.0
    """In which a step ran."""

    host_s: float = 0.0
    """CPU time of the scheduler's thread in the window, without bringing it requests."""

    num_steps: int = 0
    """Batches that it launched in the window."""

    num_suspended: int = 0
    """Steps that were suspended for an arrival."""

    num_retracted: int = 0
    """How often offline requests lost their memory, or their place in the batch."""

    from_prefixes: float = 0.0
    """Share of the offline prompts that was not computed before the first token."""

    recomputed: float = 0.0
    """What was computed of them besides, ÷ the same prompts."""

    online_from_cache: float = 0.0
    """Share of the online prompts that was not computed before the first token."""


@dataclass(slots=True)
class LiveRequest:
    """A request that was sent."""

    at_s: float
    prompt_tokens: int
    is_offline: bool
    times_s: list[float] = field(default_factory=list)
    is_finished: bool = False
    num_retracted: int = 0
    prefilled: list[tuple[bool, int]] = field(default_factory=list)
    """Of each step, whether the first token was there before it, and the tokens computed."""

    def timeline(self, rid: str) -> RequestTimeline:
        """Return what it got."""
        outcome = Outcome.FINISHED if self.times_s else Outcome.FAILED
        if not self.is_finished:
            outcome = Outcome.UNFINISHED
        times_s = tuple(self.times_s)
        return RequestTimeline(rid, self.at_s, times_s, self.prompt_tokens, outcome=outcome)


def outcome_of(
    requests: Sequence[LiveRequest], begin_s: float, end_s: float, num_online: int
) -> RunOutcome:
    """Return what a run brought by what its requests got; the rest of it is for who watched it.

    Args:
        requests: All that were sent.
        begin_s: Of the window in which offline tokens count.
        end_s: Of it.
        num_online: Requests that were to come.
    """
    online = [live for live in requests if not live.is_offline]
    offline = [live for live in requests if live.is_offline]
    got = (live.timeline("offline") for live in offline)
    prompts, needed, computed = _prompt_tokens(offline)
    online_prompts, online_needed, _ = _prompt_tokens(online)
    return RunOutcome(
        [live.timeline("online") for live in online],
        end_s - begin_s,
        throughput(got, begin_s, end_s).total_tokens_per_s,
        num_online - sum(live.is_finished for live in online),
        num_retracted=sum(live.num_retracted for live in offline),
        from_prefixes=1 - needed / prompts,
        recomputed=(computed - needed) / prompts,
        online_from_cache=1 - online_needed / online_prompts,
    )


def _prompt_tokens(requests: Sequence[LiveRequest]) -> tuple[int, int, int]:
    """Return tokens of the prompts that have a first token, needed for it, and computed in all."""
    begun = [live for live in requests if live.times_s]
    prompts = max(1, sum(live.prompt_tokens for live in begun))
    firsts = [sum(n for later, n in live.prefilled if not later) for live in begun]
    needed = sum(min(n, live.prompt_tokens) for n, live in zip(firsts, begun, strict=True))
    return prompts, needed, sum(n for live in begun for _, n in live.prefilled)
