"""Where the engine's time went: sums over all steps, and the last decisions as sentences."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from sglang_coserve.core.step import Bound, Lane, StepPlan, StepResult

_SPAN_S: Final = 5.0
"""Decisions of one kind within it are one entry: an engine takes hundreds of steps meanwhile."""

_ENTRIES: Final = 32


class Subject(Enum):
    """What was decided; the sentence says it of ``{value}``."""

    ALONE = "Offline steps of {value}: no online request runs or waits."
    FITS = "Offline steps of {value} fit before the next online token is due."
    CUT = (
        "Offline steps limited to {value}: the next online token is due then, and the rest of "
        "the step comes later."
    )
    BESIDE_TOKENS = (
        "Offline work beside online requests limited to {value} a step: online tokens are due then."
    )
    BESIDE_PROMPTS = (
        "Offline work beside online requests limited to {value} a step: the first token of a "
        "prompt is due then."
    )
    BESIDE_ARRIVALS = (
        "Offline work limited to {value} a step: an online request that arrives meanwhile may not "
        "wait longer for it."
    )
    BESIDE_WAITING = (
        "Offline work beside online prompts limited to {value} a step: their first tokens may be "
        "delayed no more."
    )
    LEAST_PIECE = "Offline work beside streams limited to {value} a step: one piece of a prompt."
    BESIDE_BUDGET = "Offline work limited to {value} a step: the fixed budget leaves no more."
    UNLIMITED = "Offline work of {value} a step beside online requests: no target limits it."
    NONE_BESIDE = "Online steps without offline work in them: they left no time for it."
    PROMPTS_FIRST = "Online prompts computed alone: neither decodes nor offline work beside them."
    PROMPT_LEFT = "No offline work beside an online prompt that needs more than one step."
    SUSPENDED = "No other offline work in steps of online decodes: a suspended step goes on soon."
    CROWDED = "No offline work: it has slowed online decodes, whose KV the next prompts need."
    DROPPED = "Suspended offline steps given up: online requests needed what they held."
    RETRACTED = "KV of {value} taken back from running requests: memory was short."
    PAUSED = "{value} paused with their KV kept: the steps had no time for them."
    SHED = "{value} refused: they could no longer meet their TTFT target."


_UNITS: Final = {
    Subject.RETRACTED: ("token", "tokens"),
    Subject.PAUSED: ("decode", "decodes"),
    Subject.SHED: ("online request", "online requests"),
}
"""What values are counted in, and summed up; all others are seconds of a step."""


_BESIDE: Final = {
    Bound.BUDGET: Subject.BESIDE_BUDGET,
    Bound.GAP: Subject.BESIDE_TOKENS,
    Bound.PROMPT: Subject.BESIDE_PROMPTS,
    Bound.PROMPTS_WAIT: Subject.BESIDE_WAITING,
    Bound.ARRIVAL: Subject.BESIDE_ARRIVALS,
    Bound.LEAST_PIECE: Subject.LEAST_PIECE,
}
"""Subjects of steps with online requests, by the reason of their limit."""

_WITHOUT: Final = {
    Bound.PROMPTS_FIRST: Subject.PROMPTS_FIRST,
    Bound.PROMPT_LEFT: Subject.PROMPT_LEFT,
    Bound.SUSPENDED: Subject.SUSPENDED,
    Bound.KV: Subject.CROWDED,
}
"""Subjects of online steps that may hold no offline work, by the reason."""


_Decision = tuple[Subject, float]
"""A subject, and the value in its sentence; 0 for a sentence without one."""


def _decisions_of(plan: StepPlan, result: StepResult) -> Iterator[_Decision]:
    """Yield the decisions of a step that was carried out."""
    if result.dropped:
        yield Subject.DROPPED, 0.0
        return
    if plan.shed:
        yield Subject.SHED, len(plan.shed)
    if plan.retract:
        yield Subject.RETRACTED, sum(retraction.tokens for retraction in plan.retract)
    if plan.pause:
        yield Subject.PAUSED, len(plan.pause)
    if result.batch.is_empty:
        return
    if plan.lane is Lane.OFFLINE:
        yield _in_lane(plan, result)
    elif result.served:
        yield _beside_online(plan, result)
    elif result.has_offline:
        yield Subject.ALONE, plan.predicted_s


def _in_lane(plan: StepPlan, result: StepResult) -> _Decision:
    left_s = _allowed_s(plan, result)
    if math.isinf(left_s):
        return Subject.ALONE, plan.predicted_s
    if plan.predicted_s > left_s:
        return Subject.CUT, left_s
    return Subject.FITS, plan.predicted_s


def _beside_online(plan: StepPlan, result: StepResult) -> _Decision:
    allowed_s = _allowed_s(plan, result)
    if allowed_s <= 0 and not result.has_offline:
        return _WITHOUT.get(plan.bound_by, Subject.NONE_BESIDE), 0.0
    if math.isinf(allowed_s):
        return Subject.UNLIMITED, max(plan.predicted_s - plan.online_part_s, 0)
    return _BESIDE.get(plan.bound_by, Subject.BESIDE_TOKENS), max(allowed_s, 0.0)


def _allowed_s(plan: StepPlan, result: StepResult) -> float:
    """Return how long the plan let offline work take; infinite if nothing limited it."""
    if plan.lane is Lane.OFFLINE:
        return plan.until_s - result.started_s
    return plan.budget_s - plan.online_part_s


@dataclass(slots=True)
class _Entry:
    subject: Subject
    first_s: float
    last_s: float
    least: float
    most: float
    total: float
    steps: int = 1

    def add(self, now_s: float, value: float) -> None:
        self.last_s = now_s
        self.least, self.most = min(self.least, value), max(self.most, value)
        self.total += value
        self.steps += 1

    def sentence(self) -> str:
        if units := _UNITS.get(self.subject):
            value = f"{self.total:,.0f} {units[self.total != 1]}"
        else:
            value = _range_ms(self.least, self.most)
        return self.subject.value.format(value=value)


class DecisionLog:
    """Keeps the newest decisions.

    Those of one kind are one entry within a few seconds, and for as long as there is no other.
    """

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque(maxlen=_ENTRIES)
        self._open: dict[Subject, _Entry] = {}

    def note(self, subject: Subject, value: float, now_s: float) -> None:
        """Take in a decision that was made at ``now_s``. O(1)."""
        entry = self._open.get(subject)
        is_newest = bool(self._entries) and entry is self._entries[-1]
        if entry is not None and (is_newest or now_s - entry.first_s < _SPAN_S):
            entry.add(now_s, value)
            return
        entry = _Entry(subject, now_s, now_s, value, value, value)
        self._open[subject] = entry
        self._entries.append(entry)

    def to_list(self, now_s: float) -> list[dict[str, Any]]:
        """Return them as JSON has them, the newest first: what, in how many steps,
        how long ago the last of them began, and how long after the first."""
        newest = sorted(self._entries, key=lambda entry: entry.last_s, reverse=True)
        return [
            {
                "subject": entry.subject.name.lower(),
                "text": entry.sentence(),
                "steps": entry.steps,
                "age_s": max(now_s - entry.last_s, 0.0),
                "span_s": entry.last_s - entry.first_s,
            }
            for entry in newest
        ]


def _range_ms(least_s: float, most_s: float) -> str:
    least, most = (f"{seconds * 1e3:.3g}" for seconds in (least_s, most_s))
    return f"{most} ms" if least == most else f"{least} to {most} ms"


@dataclass(slots=True)
class WorkTotals:
    """Sums since the start, which never shrink; who wants rates takes differences."""

    steps: int = 0
    """Steps that ran to their end."""

    online_s: float = 0.0
    """Of their time, what online requests took."""

    offline_s: float = 0.0
    """Of their time, what offline requests took."""

    granted_s: float = 0.0
    """How long the plans allowed offline work to take; where nothing limits it, what it took."""

    lost_s: float = 0.0
    """The time of suspended steps that were given up, as far as it is known."""

    dropped_steps: int = 0
    """Of those, how many."""

    online_tokens: int = 0
    """Tokens computed, prompts and outputs."""

    offline_tokens: int = 0
    retracted_tokens: int = 0
    """KV given up, to be computed again."""


class WorkLog:
    """Follows the steps of a scheduler."""

    def __init__(self) -> None:
        self.totals = WorkTotals()
        self.decisions = DecisionLog()

    def ended(
        self,
        plan: StepPlan | None,
        result: StepResult,
        online_s: float,
        offline_s: float,
    ) -> None:
        """Note what came of a step. O(requests that were prefilled + online requests).

        ``plan`` is None for a step that the engine took without a plan. ``online_s`` and
        ``offline_s`` are the seconds of the step spent on each class.
        """
        totals = self.totals
        if plan is not None:
            for subject, value in _decisions_of(plan, result):
                self.decisions.note(subject, value, result.started_s)
            totals.retracted_tokens += sum(retraction.tokens for retraction in plan.retract)
        if result.dropped:
            totals.dropped_steps += 1
            totals.lost_s += result.seconds or 0.0
        if result.batch.is_empty:
            return
        totals.steps += 1
        totals.online_s += online_s
        totals.offline_s += offline_s
        if plan is not None:
            allowed_s = _allowed_s(plan, result)
            totals.granted_s += offline_s if math.isinf(allowed_s) else max(allowed_s, 0.0)
        prompt_tokens = sum(tokens for _, tokens in result.online_chunks)
        online_tokens = result.num_online_decodes + prompt_tokens
        totals.online_tokens += online_tokens
        totals.offline_tokens += result.batch.compute_tokens - online_tokens
