"""The operator's routes of the last steps: for Perfetto, as JSON, and to explain a request."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import FastAPI, Query
from starlette.responses import Response

from sglang_coserve.batch.errors import NotFoundError
from sglang_coserve.batch.routes.view import view_answer
from sglang_coserve.srt.monitoring.scheduler_query import LAST_STEPS, LONGEST_STEPS, STEPS_OF, ask
from sglang_coserve.srt.monitoring.step_ring import MOST_STEPS, StepDocument
from sglang_coserve.srt.monitoring.step_trace import process_name, trace_events, trace_text
from sglang_coserve.view.lateness import explain, step_text
from sglang_coserve.web.keys import operator_router
from sglang_coserve.web.routes import endpoints_of

TRACE_PATH: Final = "/coserve/trace"
STEPS_PATH: Final = "/coserve/steps"

_MOST_TRACE_S: Final = 600.0
_MOST_STEPS_S: Final = 60.0
_MOST_IN_ANSWER: Final = 1000

_SLICE_S: Final = 5.0
"""Span of the steps of one answer. A scheduler serves no request while it makes an answer: 1 ms for
a hundred steps."""

_OVERLAP_S: Final = 0.5
"""Time by which slices overlap, as a question may wait before it is answered."""


async def _last_steps(manager: Any, seconds: float) -> list[list[StepDocument]]:
    """Return the steps of the last ``seconds`` of each replica, the oldest first."""
    began_s, replicas = time.monotonic(), list[dict[float, StepDocument]]()
    for number in reversed(range(math.ceil(seconds / _SLICE_S))):
        late_s = time.monotonic() - began_s
        from_s = min((number + 1) * _SLICE_S, seconds) + late_s + _OVERLAP_S
        until_s = number * _SLICE_S + late_s if number else 0.0
        answers = await ask(manager, LAST_STEPS, from_s, until_s)
        replicas = replicas or [{} for _ in answers]
        for steps, answer in zip(replicas, answers, strict=True):
            steps |= {step["ended_s"]: step for step in answer}
    return [list(steps.values()) for steps in replicas]


def add_step_routes(http_server: Any) -> list[Any]:
    """Add the routes to SGLang's app; return their functions."""
    app: FastAPI = http_server.app
    router = operator_router()

    def manager() -> Any:
        return http_server._global_state.tokenizer_manager

    @router.get(TRACE_PATH, response_class=Response)
    async def trace(seconds: Annotated[float, Query(gt=0, le=_MOST_TRACE_S)] = 60.0) -> Response:
        """Return the steps of the last `seconds`, as far as they are kept: Trace Event Format."""
        traces = await _last_steps(manager(), seconds)
        content = await asyncio.to_thread(_file, traces)
        headers = {"content-disposition": 'attachment; filename="coserve-trace.json"'}
        return Response(content, media_type="application/json", headers=headers)

    @router.get(STEPS_PATH, response_class=Response)
    async def steps(
        seconds: Annotated[float, Query(gt=0, le=_MOST_STEPS_S)] = 10.0,
        limit: Annotated[int, Query(ge=1, le=_MOST_IN_ANSWER)] = 100,
    ) -> Response:
        """Return the longest steps of the last `seconds`, at most `limit` of each replica."""
        replicas = await ask(manager(), LONGEST_STEPS, seconds, limit)
        for replica in replicas:
            replica["steps"] = [step | {"text": step_text(step)} for step in replica["steps"]]
        return view_answer(200, {"replicas": replicas})

    @router.get(STEPS_PATH + "/{request_id:path}", response_class=Response)
    async def steps_of(request_id: str) -> Response:
        """Explain the latencies of a request; its id is its answer's, or its `x-request-id`."""
        found = []
        for rid in manager().coserve_request_ids.engine_ids(request_id):
            stories = await ask(manager(), STEPS_OF, rid)
            for replica, story in enumerate(stories):
                if story is not None:
                    explanation = await asyncio.to_thread(explain, story)
                    found.append({"replica": replica, **explanation})
        if not found:
            raise NotFoundError(
                f"no kept step had a request {request_id[:300]!r}: each replica keeps its last "
                f"{MOST_STEPS:,} steps, which is 160 s at 20 ms a step, and a request that still "
                "waits has none. The id is that of the answer, the x-request-id in its headers, or "
                "the request_id in the record of a batch's line",
                code="request_not_found",
                param="request_id",
            )
        return view_answer(200, {"id": request_id, "requests": found})

    app.router.routes.extend(router.routes)
    return endpoints_of(router)


def _file(traces: Sequence[Sequence[StepDocument]]) -> bytes:
    events = []
    for process, steps in enumerate(traces, 1):
        events.append(process_name(f"sglang_coserve, replica {process - 1}", process=process))
        events += trace_events(steps, process)
    return trace_text(events).encode()
