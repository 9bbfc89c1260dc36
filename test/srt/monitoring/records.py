"""Records of steps as tests write them."""

from __future__ import annotations

from typing import Any

from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.core.step import Bound, ServedRequest, StepPlan, StepResult
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.srt.forward_kind import ForwardKind
from sglang_coserve.srt.steps.step_record import Reception, StepRecord, StepRequest

RECEPTION = Reception(0.6, None, 0.7)


def info(rid: str, *, offline: bool = False, arrival_s: float = 0.5) -> RequestInfo:
    request_class = RequestClass.OFFLINE if offline else RequestClass.ONLINE
    return RequestInfo(
        rid,
        request_class,
        prompt_tokens=3,
        max_new_tokens=4,
        arrival_s=arrival_s,
        job="job" if offline else None,
    )


def prompt(
    request: RequestInfo, token_s: float | None, *, tokens: int = 3, cached: int = 0, **more: Any
) -> StepRequest:
    values = {"reception": RECEPTION, **more}
    return StepRequest(request, token_s, None, tokens, cached, **values)


def decode(request: RequestInfo, last_s: float, token_s: float) -> StepRequest:
    return StepRequest(request, token_s, last_s)


def record(
    launched_s: float, ended_s: float, *requests: StepRequest, number: int = 0, **more: Any
) -> StepRecord:
    """A step that was planned for as long as it took."""
    prefills = [(one.prompt_tokens, one.context_tokens) for one in requests if one.prompt_tokens]
    decodes = [10 for one in requests if not one.prompt_tokens]
    served = [ServedRequest(one.info, one.token_s) for one in requests if one.info.is_online]
    result = StepResult(
        number,
        launched_s,
        ended_s - launched_s,
        StepStats.of(prefills, decodes),
        served=tuple(served),
    )
    plan = StepPlan(
        step=number, predicted_s=ended_s - launched_s, budget_s=0.25, bound_by=Bound.GAP
    )
    values = {
        "result": result,
        "plan": plan,
        "kind": ForwardKind.EXTEND if prefills else ForwardKind.DECODE,
        "launched_s": launched_s,
        "ended_s": ended_s,
        "online": tuple(one for one in requests if one.info.is_online),
        "offline": tuple(one for one in requests if not one.info.is_online),
        "first": tuple(one for one in requests if one.token_s is not None and one.last_s is None),
    }
    return StepRecord(**(values | more))
