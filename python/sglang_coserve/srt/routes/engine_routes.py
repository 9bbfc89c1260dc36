"""``GET /coserve/load`` and ``/coserve/trace``: how loaded the engine is, and its last steps.

The load is for gateways and autoscalers, the trace, a file for Perfetto, for the operator.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

from fastapi import FastAPI, HTTPException, Query, Response

from sglang_coserve import __version__
from sglang_coserve.batch.routes import operator_router
from sglang_coserve.core.engine_load import EngineLoad, ReplicaLoad, Versions, total
from sglang_coserve.http_lines.messages import LOAD_PATH
from sglang_coserve.srt import compat
from sglang_coserve.srt.batch_backend.loaded_model import (
    kv_fingerprint,
    kv_format,
    model_in_use,
    model_names,
)
from sglang_coserve.srt.monitoring.scheduler_query import ask, last_steps
from sglang_coserve.srt.monitoring.step_trace import Record, process_name, trace_events, trace_text
from sglang_coserve.srt.routes.drain import is_draining

__all__ = ["LOAD_PATH", "TRACE_PATH", "has_room", "install_load_route", "install_trace_route"]

logger = logging.getLogger(__name__)


def install_load_route(http_server: Any) -> None:
    """Add the route to SGLang's app, behind the admin key where there is one."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app: FastAPI = http_server.app

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def load() -> EngineLoad:
        """Say how loaded all replicas are, by class, and what they serve."""
        manager = http_server._global_state.tokenizer_manager
        return await _engine_load(manager, is_draining=is_draining(app))

    app.add_api_route(LOAD_PATH, load, methods=["GET"])
    stock_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[Any]:
        # Now, while the files are still those that were loaded.
        manager = http_server._global_state.tokenizer_manager
        logger.info("the model's fingerprint is %s", await manager.coserve_fingerprint())
        async with stock_lifespan(app) as state:
            yield state

    app.router.lifespan_context = lifespan


async def _engine_load(manager: Any, *, is_draining: bool) -> EngineLoad:
    args = compat.settings_of(manager.server_args)
    snapshots = await manager.get_loads()
    loads = [snapshot for snapshot in snapshots if snapshot.coserve is not None]
    if len(loads) < max(1, args.dp_size):
        raise HTTPException(
            503,
            f"{len(loads)} of {args.dp_size} replicas have reported a load: ask again in a second",
            headers={"Retry-After": "1"},
        )
    model = model_in_use(manager, await manager.coserve_fingerprint())
    kv = kv_format(args)
    return EngineLoad(
        **total([ReplicaLoad(**snapshot.coserve) for snapshot in loads]).model_dump(),
        replicas=len(loads),
        age_s=max(0.0, time.time() - min(snapshot.timestamp for snapshot in loads)),
        is_draining=is_draining or bool(manager.gracefully_exit),
        model_name=args.served_model_name,
        models=model_names(manager),
        model=model,
        kv_fingerprint=kv_fingerprint(model, kv),
        kv_format=kv,
        versions=Versions(
            sglang_coserve=__version__, sglang=compat.installed_version() or "unknown"
        ),
    )


async def has_room(manager: Any) -> bool:
    """Return whether an offline request that comes now would begin soon, by what is reported."""
    loads = [ReplicaLoad(**each.coserve) for each in await manager.get_loads() if each.coserve]
    # It goes to any replica; a number that is not known says nothing against one.
    return not loads or any(
        not load.offline.waiting and load.headroom_tokens_per_s != 0 for load in loads
    )


TRACE_PATH: Final = "/coserve/trace"
_MOST_S: Final = 600.0


def install_trace_route(http_server: Any) -> Any:
    """Add the route to SGLang's app; return its function."""
    app: FastAPI = http_server.app
    router = operator_router()

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
