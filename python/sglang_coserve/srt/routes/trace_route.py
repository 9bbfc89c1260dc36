"""``/coserve/trace``: the last steps of the engine as a file for Perfetto, for the operator."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Query, Response

from sglang_coserve.batch.routes import (
    ERROR_RESPONSES,
    OPERATOR_ERROR_RESPONSES,
    JsonRoute,
    check_admin_key,
)
from sglang_coserve.srt.monitoring.perfetto import process_name, trace_text
from sglang_coserve.srt.monitoring.scheduler_query import ask, last_steps
from sglang_coserve.srt.monitoring.step_trace import Record, trace_events

__all__ = ["TRACE_PATH", "install_trace_route"]

TRACE_PATH: Final = "/coserve/trace"
_MOST_S: Final = 600.0


def install_trace_route(http_server: Any) -> Any:
    """Add the route to SGLang's app; return its function."""
    app: FastAPI = http_server.app
    router = APIRouter(
        tags=["operator"],
        route_class=JsonRoute,
        responses=ERROR_RESPONSES | OPERATOR_ERROR_RESPONSES,
        dependencies=[Depends(check_admin_key)],
    )

    @router.get(TRACE_PATH, response_class=Response)
    async def trace(seconds: Annotated[float, Query(gt=0, le=_MOST_S)] = 60.0) -> Response:
        """Return the steps of the last ``seconds``, as far as they are kept: Trace Event Format."""
        manager = http_server._global_state.tokenizer_manager
        traces = await ask(manager, last_steps(seconds))
        content = await asyncio.to_thread(_file, traces)
        headers = {"content-disposition": 'attachment; filename="coserve-trace.json"'}
        return Response(content, media_type="application/json", headers=headers)

    app.router.routes.extend(router.routes)
    return trace


def _file(traces: Sequence[Sequence[Record]]) -> bytes:
    events = []
    for process, records in enumerate(traces, 1):
        events.append(process_name(f"sglang_coserve, replica {process - 1}", process=process))
        events += trace_events(records, process)
    return trace_text(events).encode()
