"""What a run brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class RunOutcome:
    """What a run brought, in seconds of CPU time."""

    seconds: float
    ttft_s: list[float]
    gaps_s: list[float]
    offline_tokens: int
    """Prompt tokens of requests that had their first token, and output tokens."""

    num_unfinished: int
    counters: dict[str, int] = field(default_factory=dict)
    """What became of offline requests since the engine began, as in ``/coserve/status``."""

    busy_s: float = 0.0
    """In which a step ran."""

    requests: list[OnlineOutcome] = field(default_factory=list)
    """The online requests, in the order of their arrival."""

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


@dataclass(frozen=True, slots=True)
class OnlineOutcome:
    """What became of an online request."""

    ttft_s: float | None
    """None: it was refused."""

    tpot_s: float | None
    """None with fewer than two tokens."""

    normalized_s: float | None = None
    """From its arrival to its last token, ÷ its tokens; None: it was refused."""


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
    offline_tokens = 0
    for live in offline:
        offline_tokens += sum(begin_s <= at_s < end_s for at_s in live.times_s)
        if live.times_s and begin_s <= live.times_s[0] < end_s:
            offline_tokens += live.prompt_tokens
    begun = [live for live in offline if live.times_s]
    prompts = max(1, sum(live.prompt_tokens for live in begun))
    firsts = [sum(n for later, n in live.prefilled if not later) for live in begun]
    computed = sum(n for live in begun for _, n in live.prefilled)
    needed = sum(min(n, live.prompt_tokens) for n, live in zip(firsts, begun, strict=True))
    return RunOutcome(
        end_s - begin_s,
        [live.times_s[0] - live.at_s for live in online if live.times_s],
        [after - before for live in online for before, after in pairwise(live.times_s)],
        offline_tokens,
        num_online - sum(live.is_finished for live in online),
        requests=[_online_outcome(live) for live in online],
        num_retracted=sum(live.num_retracted for live in offline),
        from_prefixes=1 - needed / prompts,
        recomputed=(computed - needed) / prompts,
    )


def _online_outcome(live: LiveRequest) -> OnlineOutcome:
    times_s = live.times_s
    ttft_s = times_s[0] - live.at_s if times_s else None
    tpot_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else None
    normalized_s = (times_s[-1] - live.at_s) / len(times_s) if times_s else None
    return OnlineOutcome(ttft_s, tpot_s, normalized_s)
