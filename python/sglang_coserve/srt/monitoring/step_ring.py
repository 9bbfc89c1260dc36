"""The last steps of a scheduler, for ``/coserve/steps``, ``coserve why`` and Perfetto."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import nlargest
from itertools import islice
from typing import Any, Final, NamedTuple

from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt.steps.step_record import Reception, StepRecord

MOST_STEPS: Final = 1 << 13
"""Number of kept steps: 160 s at 20 ms a step. 35 MB at most, with 512 requests in each step."""

_MOST_NAMES: Final = 32
"""Requests of a class that a document names. Its counts have all of them."""

_MOST_IN_STORY: Final = 1 << 10
"""Most steps in the story of a request. The scheduler serves no request while it tells one."""

_MOST_UNSEEN: Final = 256
"""Newest steps in which a request is looked for that neither began nor ended in a kept step."""

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
    """Requests without a token: more of a prompt is still to be computed, or the request was
    retracted before its token came."""

    new: tuple[tuple[RequestInfo, Reception], ...]
    first: tuple[str, ...]
    last: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Its time as measured, or else from its beginning to its results."""
        measured_s = self.record.result.seconds
        return self.record.ended_s - self.begins_s if measured_s is None else measured_s


class _Row(NamedTuple):
    """A step in the story of a request."""

    kept: _KeptStep
    is_in: bool
    has_token: bool
    """True if the request got a token in it."""

    gap_s: float | None
    """Time since its token before, or since its arrival; None without a token, or if unknown."""


class StepRing:
    """Keeps the last steps."""

    def __init__(self) -> None:
        self._steps: deque[_KeptStep] = deque(maxlen=MOST_STEPS)
        self._ended_s = 0.0

    def add(self, record: StepRecord) -> None:
        """Keep a step. O(its requests)."""
        begins_s = record.launched_s
        if not record.suspensions:  # A step that may be suspended begins after the step before it.
            begins_s = max(begins_s, self._ended_s)
        if not record.is_dropped:  # A dropped step has not run until its drop.
            self._ended_s = max(self._ended_s, record.ended_s)
        self._steps.append(_kept(record, begins_s))

    def between(
        self, from_s: float, until_s: float, suspended: StepRecord | None = None
    ) -> list[StepDocument]:
        """Return the steps that ended from ``from_s`` on and before ``until_s``, the oldest first.

        ``suspended`` is the record of a suspended step so far. O(kept steps).
        """
        return [
            _document(kept)
            for kept in self._with(suspended)
            if from_s <= kept.record.ended_s < until_s
        ]

    def _with(self, suspended: StepRecord | None) -> Iterable[_KeptStep]:
        if suspended is None:
            return self._steps
        return (*self._steps, _kept(suspended, suspended.launched_s))

    def longest_since(
        self, at_s: float, limit: int, suspended: StepRecord | None = None
    ) -> StepDocument:
        """Return the longest of the steps that ended after ``at_s``, in their order, and how many
        were left out. O(kept steps)."""
        last = [kept for kept in self._with(suspended) if kept.record.ended_s >= at_s]
        chosen = nlargest(limit, range(len(last)), key=lambda place: last[place].seconds)
        steps = [_document(last[place]) for place in sorted(chosen)]
        return {"steps": steps, "steps_left_out": len(last) - len(steps)}

    def of_request(self, rid: str, suspended: StepRecord | None = None) -> StepDocument | None:
        """Return the steps from the arrival of a request to its last token, with and without it.

        None if the request is in no kept step. ``suspended`` is the record of a suspended step so
        far. A story of more than ``_MOST_IN_STORY`` steps has
        the longest of them. O(kept steps + steps
        of the request · their requests).
        """
        new, begin, end = self._span(rid)
        info = None if new is None else new[0]
        rows: list[_Row] = []
        token_s = None if info is None else info.arrival_s
        is_ended = False
        for place, kept in enumerate(self._with(suspended)):
            may_be_in = begin <= place <= end or place == len(self._steps)
            is_in = may_be_in and (rid in kept.online or rid in kept.offline)
            if not is_in and (not rows if info is None else kept.record.ended_s <= info.arrival_s):
                continue
            has_token = is_in and rid not in kept.silent and not kept.record.is_dropped
            ended_s = kept.record.ended_s
            gap_s = ended_s - token_s if has_token and token_s is not None else None
            rows.append(_Row(kept, is_in, has_token, gap_s))
            if has_token:
                token_s = ended_s
            is_ended = rid in kept.last if is_in else is_ended
        last = next((row for row in reversed(rows) if row.is_in), None)
        if last is None:
            return None
        last_s = last.kept.record.ended_s
        rows = [row for row in rows if row.is_in or row.kept.begins_s < last_s]
        is_full = len(self._steps) == MOST_STEPS
        request: StepDocument = {
            "rid": rid,
            "class": "online" if rid in last.kept.online else "offline",
            "arrival_s": rows[0].kept.begins_s if info is None else info.arrival_s,
            "is_whole": info is not None,
            "is_ended": is_ended,
            "kept_from_s": self._steps[0].begins_s if is_full else None,
        }
        if new is not None:
            request |= {"prompt_tokens": new[0].prompt_tokens, "batch": new[0].job}
            request |= new[1]._asdict()
        return {"request": request, **_story(rid, rows)}

    def _span(self, rid: str) -> tuple[tuple[RequestInfo, Reception] | None, int, int]:
        """Return a request and its reception, None if its first step is not kept, and the places of
        its first and last step. Without any step, the last place is -1."""
        found, begin, end = None, 0, len(self._steps) - 1
        is_known = False
        for place, kept in enumerate(self._steps):
            if rid in kept.last or any(left.rid == rid for left in kept.record.left):
                is_known, end = True, place
            for new in kept.new:
                if new[0].rid == rid:
                    is_known, found, begin, end = True, new, place, len(self._steps) - 1
                    # A prompt of one token ends in its first step.
                    end = place if rid in kept.last else end
        newest = islice(reversed(self._steps), _MOST_UNSEEN)
        if is_known or any(rid in kept.online or rid in kept.offline for kept in newest):
            return found, begin, end
        return None, 0, -1


def _kept(record: StepRecord, begins_s: float) -> _KeptStep:
    requests = record.requests
    prompts = record.prompts
    result = replace(record.result, served=(), chunks=(), jobs=())
    return _KeptStep(
        replace(record, result=result, online=(), offline=(), first=()),
        begins_s,
        online=tuple([info.rid for info, *_ in record.online]),
        offline=tuple([info.rid for info, *_ in record.offline]),
        prompts={one.info.rid: one.prompt_tokens for one in prompts},
        silent=frozenset([info.rid for info, token_s, *_ in requests if token_s is None]),
        new=tuple([(one.info, one.reception) for one in prompts if one.reception is not None]),
        first=tuple([one.info.rid for one in record.first]),
        last=tuple([one.info.rid for one in requests if one.is_last]),
    )


def _story(rid: str, rows: Sequence[_Row]) -> StepDocument:
    tokens = [place for place, row in enumerate(rows) if row.has_token]
    before = tokens[0] + 1 if tokens else len(rows)
    parts = [_longest(rows[:before], first=True), _longest(rows[before:], first=False)]
    return {
        "tokens": len(tokens),
        "computed_before_first_token": sum(
            row.kept.prompts.get(rid, 0)
            for row in rows[:before]
            if row.is_in and not row.kept.record.is_dropped
        ),
        "gaps_s": [rows[place].gap_s for place in tokens[1:]],
        "with_it": sum(row.is_in for row in rows),
        "without_it": sum(not row.is_in for row in rows),
        "steps": [_told(rid, row) for part in parts for row in part],
        "left_out": {
            "before_first_token": before - len(parts[0]),
            "after": len(rows) - before - len(parts[1]),
        },
    }


def _longest(rows: Sequence[_Row], *, first: bool) -> Sequence[_Row]:
    """Return the longest steps or gaps in order; of the wait for a first token the steps with the
    request in any case."""
    if len(rows) <= _MOST_IN_STORY // 2:
        return rows

    def rank(place: int) -> tuple[bool, bool, float]:
        kept, is_in, has_token, gap_s = rows[place]
        length_s = kept.seconds if first or gap_s is None else gap_s
        return first and has_token, first and is_in, length_s

    chosen = nlargest(_MOST_IN_STORY // 2, range(len(rows)), key=rank)
    return [rows[place] for place in sorted(chosen)]


def _told(rid: str, row: _Row) -> StepDocument:
    document = _document(row.kept, names=False)
    document["role"] = _role(row.kept, rid) if row.is_in else "waits"
    document["prompt_tokens_of_request"] = row.kept.prompts.get(rid, 0)
    if row.has_token:
        document["gap_s"] = row.gap_s
    return document


def _role(kept: _KeptStep, rid: str) -> str:
    return "prefill" if rid in kept.prompts else "decode"


def _document(kept: _KeptStep, *, names: bool = True) -> StepDocument:
    record = kept.record
    plan, result = record.plan, record.result
    offline_tokens = offline_prompts = 0
    if kept.prompts:
        offline = set(kept.offline)
        tokens_of = [tokens for rid, tokens in kept.prompts.items() if rid in offline]
        offline_tokens, offline_prompts = sum(tokens_of), len(tokens_of)
    document: StepDocument = {
        "number": result.step,
        "kind": None if record.kind is None else record.kind.value,
        "launched_s": record.launched_s,
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
        "decodes": {
            "online": len(kept.online) - len(kept.prompts) + offline_prompts,
            "offline": len(kept.offline) - offline_prompts,
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
            "prompt_stop": None if plan.prompt_stop is None else plan.prompt_stop.value,
        }
    if names:
        document |= {
            "online": kept.online[:_MOST_NAMES],
            "offline": kept.offline[:_MOST_NAMES],
            "new": [_started(info) for info, _ in kept.new],
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
