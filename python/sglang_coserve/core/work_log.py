"""Where the engine's time went: sums over all steps so far, and the last decisions."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from sglang_coserve.core.decision_log import DecisionLog, decisions_of
from sglang_coserve.core.step import Lane, StepPlan, StepResult

__all__ = ["WorkLog", "WorkTotals"]


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

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as JSON has them."""
        return asdict(self)


class WorkLog:
    """Follows the steps of a scheduler."""

    def __init__(self) -> None:
        self.totals = WorkTotals()
        self.decisions = DecisionLog()
        self._arrival_s: dict[int, float] = {}

    def started(self, plan: StepPlan, arrival_s: float) -> None:
        """Note a plan that is carried out, and how long an arrival may wait for its step. O(1)."""
        self._arrival_s[plan.step] = arrival_s

    def ended(
        self, plan: StepPlan | None, result: StepResult, online_s: float, offline_s: float
    ) -> None:
        """Note what came of a step. O(requests that were prefilled + online requests).

        Args:
            plan: None of a step that the engine took without one.
            result: What came of it.
            online_s: What of its time, of that of all steps, was online requests'.
            offline_s: What of it was offline requests'.
        """
        totals = self.totals
        if plan is not None:
            arrival_s = self._arrival_s.pop(plan.step)
            for decision in decisions_of(plan, result, arrival_s):
                self.decisions.note(decision, result.started_s)
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
            totals.granted_s += _granted_s(plan, result, offline_s)
        online_tokens = _online_tokens(result)
        totals.online_tokens += online_tokens
        totals.offline_tokens += result.batch.compute_tokens - online_tokens


def _granted_s(plan: StepPlan, result: StepResult, offline_s: float) -> float:
    if plan.lane is Lane.OFFLINE:
        allowed_s = plan.until_s - result.started_s
    else:
        allowed_s = plan.budget_s - plan.expected.online_part_s
    return offline_s if math.isinf(allowed_s) else max(allowed_s, 0.0)


def _online_tokens(result: StepResult) -> int:
    chunks = result.online_chunks
    num_decodes = len(result.served) - len(chunks)
    return num_decodes + sum(tokens for _, tokens in chunks)
