"""The last steps of a scheduler, for ``/coserve/steps``, ``coserve why`` and Perfetto."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt.steps.step_record import StepRecord

_MOST_STEPS: Final = 1 << 13
"""Kept steps: some minutes. 35 MB at most, with 512 requests in each step."""

_MOST_NAMES: Final = 32
"""Requests of a class that a document names. Its counts have all of them."""

StepDocument = dict[str, Any]
"""A step as JSON has it (docs/metrics.md). Times are in seconds, of one clock."""


class _KeptStep(NamedTuple):
    """A record without its rows, which would take ten times the memory."""

    record: StepRecord
    begins_s: float
    """Time at which its batch was launched, or at which the step before it ended if later."""

    online: tuple[str, ...]
    offline: tuple[str, ...]
    prompts: Mapping[str, int]
    """Computed prompt tokens by rid."""

    silent: frozenset[str]
    """Requests without a token: more of their prompts is still to be computed."""

    new: tuple[RequestInfo, ...]
    first: tuple[str, ...]
    last: tuple[str, ...]


class StepRing:
    """Keeps the last steps."""

    def __init__(self) -> None:
        self._steps: deque[_KeptStep] = deque(maxlen=_MOST_STEPS)
        self._ended_s = 0.0

    def add(self, record: StepRecord) -> None:
        """Keep a step. O(its requests)."""
        begins_s = record.launched_s
        if not record.suspensions:  # A step that may be suspended begins after the step before it.
            begins_s = max(begins_s, self._ended_s)
        self._ended_s = max(self._ended_s, record.ended_s)
        has_prompts = record.result.batch.prefill_requests > 0 or record.is_dropped
        prompts = [one for one in record.requests if one.prompt_tokens] if has_prompts else []
        self._steps.append(
            _KeptStep(
                replace(record, online=(), offline=(), first=()),
                begins_s,
                online=tuple([info.rid for info, *_ in record.online]),
                offline=tuple([info.rid for info, *_ in record.offline]),
                prompts={one.info.rid: one.prompt_tokens for one in prompts},
                silent=frozenset([one.info.rid for one in prompts if one.token_s is None]),
                new=tuple([one.info for one in prompts if one.is_new]),
                first=tuple([one.info.rid for one in record.first]),
                last=tuple([one.info.rid for one in record.requests if one.is_last]),
            )
        )

    def since(self, at_s: float) -> list[StepDocument]:
        """Return the steps that ended after ``at_s``, the oldest first. O(kept steps)."""
        return [_document(kept) for kept in self._steps if kept.record.ended_s >= at_s]

    def of_request(self, rid: str) -> StepDocument | None:
        """Return the steps of a request, and those it waited for; None if it is in no kept step.

        O(kept steps · their requests).
        """
        infos = [info for kept in self._steps for info in kept.new if info.rid == rid]
        mine = [kept for kept in self._steps if rid in kept.online or rid in kept.offline]
        if not mine:
            return None
        last_s = mine[-1].record.ended_s
        arrival_s = infos[-1].arrival_s if infos else mine[0].begins_s
        steps, token_s = [], None if infos else math.nan
        for kept in self._steps:
            record = kept.record
            if record.ended_s <= arrival_s or kept.begins_s > last_s:
                continue
            is_in = rid in kept.online or rid in kept.offline
            has_token = is_in and rid not in kept.silent and not record.is_dropped
            document = _document(kept, names=False)
            if not is_in and token_s is not None:
                continue
            document["role"] = _role(kept, rid) if is_in else "waits"
            document["prompt_tokens_of_request"] = kept.prompts.get(rid, 0)
            if has_token:
                since_s = arrival_s if token_s is None else token_s
                gap_s = record.ended_s - since_s
                document["gap_s"] = None if math.isnan(gap_s) else gap_s
                token_s = record.ended_s
            steps.append(document)
        request: StepDocument = {"rid": rid, "arrival_s": arrival_s, "is_whole": bool(infos)}
        if infos:
            info = infos[-1]
            request |= {"class": info.request_class.value, "prompt_tokens": info.prompt_tokens}
        return {"request": request, "steps": steps}


def _role(kept: _KeptStep, rid: str) -> str:
    return "prefill" if rid in kept.prompts else "decode"


def _document(kept: _KeptStep, *, names: bool = True) -> StepDocument:
    record = kept.record
    plan, result = record.plan, record.result
    offline = set(kept.offline)
    offline_tokens = sum([tokens for rid, tokens in kept.prompts.items() if rid in offline])
    document: StepDocument = {
        "number": result.step,
        "kind": None if record.kind is None else record.kind.value,
        "begins_s": kept.begins_s,
        "ended_s": record.ended_s,
        "measured_s": result.seconds,
        "planning_s": max(record.launched_s - result.started_s, 0.0),
        "paced_s": record.paced_s,
        "requests": {"online": len(kept.online), "offline": len(kept.offline)},
        "prompt_tokens": {
            "online": sum(kept.prompts.values()) - offline_tokens,
            "offline": offline_tokens,
        },
        "is_dropped": record.is_dropped,
        "suspensions": [one._asdict() for one in record.suspensions],
        "plan": None,
    }
    if plan is not None:
        document["plan"] = {
            "lane": plan.lane.value,
            "predicted_s": plan.predicted_s,
            "predicted_online_s": plan.online_part_s,
            "budget_s": None if math.isinf(plan.budget_s) else plan.budget_s,
            "bound_by": plan.bound_by.value,
        }
    if names:
        document |= {
            "online": kept.online[:_MOST_NAMES],
            "offline": kept.offline[:_MOST_NAMES],
            "new": [_started(info) for info in kept.new],
            "first": list(kept.first),
            "last": list(kept.last),
            "left": [info.rid for info in record.left],
        }
    return document


def _started(info: RequestInfo) -> StepDocument:
    return {
        "rid": info.rid,
        "class": info.request_class.value,
        "arrival_s": info.arrival_s,
        "prompt_tokens": info.prompt_tokens,
        "batch": info.job,
    }
