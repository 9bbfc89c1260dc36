"""Lines of batches inside SGLang's server: its own Batch API, and lines that a gateway sends.

Both are opened with the server's event loop, and closed with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from msgspec.structs import replace

from sglang_coserve.batch.api import add_batch_routes, event_delivery, operator_endpoints
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.routes.service import set_not_ready, set_service, take_over
from sglang_coserve.batch.service import BatchService
from sglang_coserve.config import CoserveConfig
from sglang_coserve.http_lines.engine_load import ReplicaLoad, total
from sglang_coserve.http_lines.line_server import LineServer, add_line_routes, set_line_server
from sglang_coserve.http_lines.messages import EngineReport
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.srt.batch_backend import BatchBackend
from sglang_coserve.srt.monitoring.scheduler_query import EXPECTED_RATE_KEY, STATE_KEY
from sglang_coserve.srt.optional_parts import REQUEST_MOVES
from sglang_coserve.srt.process_health import fatal_signals_recorded_in
from sglang_coserve.srt.routes.drain import Drain, Health, add_drain_routes
from sglang_coserve.srt.routes.step_routes import add_step_routes
from sglang_coserve.web.keys import set_admin_key, set_one_owner

_POLL_S: Final = 0.2

logger = logging.getLogger(__name__)


def check_batch_settings(config: CoserveConfig) -> None:
    """Check, before the model is loaded, that the Batch API will be able to start.

    Raises:
        StartupError: the data directory cannot be used.
        ConfigError: the webhook's address or secret cannot be used.
    """
    event_delivery(config)
    if config.coserve_data_dir is not None:
        asyncio.run(BatchService.check(Path(config.coserve_data_dir)))


def add_batch_api(
    http_server: Any, health: Health, api_key: str | None, admin_api_key: str | None
) -> None:
    """Add the routes of batches, of lines and of the operator to SGLang's app; see ``served``."""
    app: FastAPI = http_server.app
    add_batch_routes(app)
    if api_key:
        set_one_owner(app)
    lines = add_line_routes(app)
    drain = add_drain_routes(app, health)
    steps = add_step_routes(http_server)
    if admin_api_key:
        from sglang.srt.utils.auth import AuthLevel, auth_level

        set_admin_key(app, admin_api_key)
        # Else SGLang would let nobody pass who has not --api-key. Without an admin key the
        # routes say so themselves, and SGLang need not look at every request.
        for endpoint in (*operator_endpoints(), *lines, *drain, *steps):
            auth_level(AuthLevel.ADMIN_FORCE)(endpoint)


def open_routes_warning(api_key: str | None, admin_api_key: str | None) -> str | None:
    """Return a warning if the keys that are set leave routes open; None otherwise."""
    if api_key or not admin_api_key:
        return None
    return (
        "--admin-api-key without --api-key: only SGLang's management routes, /coserve/batches and "
        "/coserve/lines need a key; requests, /v1/files, /v1/batches and /coserve/status are open "
        "to everybody who reaches the port, and each key, checked by nobody here, is an owner: "
        "add --api-key, or let a gateway check keys"
    )


@asynccontextmanager
async def served(
    http_server: Any,
    health: Health,
    background: TaskSupervisor,
    publish: Callable[[], Awaitable[None]] | None,
) -> AsyncGenerator[None]:
    """Within it lines are served, and the Batch API is open, as far as settings ask for them.

    ``health`` gets what drains them. ``background`` runs the tasks of the service. ``publish`` is
    to publish its metrics.
    """
    app, state = http_server.app, http_server._global_state
    config: CoserveConfig = app.server_args._coserve
    if config.coserve_data_dir is None and not app.server_args.admin_api_key:
        yield
        return
    manager = state.tokenizer_manager
    backend = BatchBackend(
        manager,
        state.template_manager,
        fingerprint=await manager.coserve_fingerprint(),
        let_leave=REQUEST_MOVES.let_leave(config, manager),
        expected_tokens_per_s=state.scheduler_info[STATE_KEY][EXPECTED_RATE_KEY],
        stalled_by=lambda: health.offline_stopped,
    )
    lines = LineServer(backend, partial(_complete_report, manager, health))
    set_line_server(app, lines)
    open_service = partial(_open_service, http_server, config, backend, background, publish)
    drain = Drain(manager, lines, open_service)
    await drain.end()
    health.drain = drain
    stopping = background.start("drain_at_stop", partial(_drain_when_stopping, backend, drain))
    try:
        yield
    finally:
        if not backend.is_stopping:
            stopping.cancel()
        await asyncio.wait({stopping})
        await drain.start()


async def _complete_report(manager: Any, health: Health, report: EngineReport) -> EngineReport:
    """Add what the schedulers of all replicas have published last, and its age."""
    loads = [snapshot.coserve for snapshot in await manager.get_loads()]
    known = [ReplicaLoad(**load) for load in loads if load is not None]
    if not known:
        return replace(report, refuses=report.refuses or "no replica has reported a load yet")
    load = total(known)
    pulse_age_s = 0.0 if health.heartbeat is None else health.heartbeat.age_s
    return replace(
        report,
        pulse_age_s=pulse_age_s,
        running=load.offline.running,
        waiting=load.offline.waiting,
        online_running=load.online.running,
        pool=load.pool,
        wants=load.wants,
        refuses=report.refuses or ("the engine is draining" if health.is_draining else None),
    )


async def _open_service(
    http_server: Any,
    config: CoserveConfig,
    backend: BatchBackend,
    background: TaskSupervisor,
    publish: Callable[[], Awaitable[None]] | None,
    stack: AsyncExitStack,
) -> None:
    """Open the Batch API for as long as ``stack``, if the server has one."""
    if config.coserve_data_dir is None:
        return
    service = await BatchService.open(
        Path(config.coserve_data_dir),
        backend,
        BatchLimits.of(config),
        event_delivery=event_delivery(config),
        background=background,
    )
    await take_over(service, http_server.app.server_args.api_key)
    set_service(http_server.app, service)
    stack.push_async_callback(_close, http_server.app, service, publish)
    stack.enter_context(fatal_signals_recorded_in(service.context.directory.fatal_signal))
    http_server._global_state.tokenizer_manager.coserve_on_death = (
        service.context.engine_lines.note_death
    )


async def _drain_when_stopping(backend: BatchBackend, drain: Drain) -> None:
    """Drain when the server is told to stop.

    SGLang waits for all requests, including lines in flight, before it shuts its app down.
    """
    while not backend.is_stopping:
        await asyncio.sleep(_POLL_S)
    logger.info("batches stop where they are; the next start continues them")
    await drain.start()


async def _close(
    app: FastAPI, service: BatchService, publish: Callable[[], Awaitable[None]] | None
) -> None:
    set_not_ready(app, "the server is draining: its batches continue when it starts again")
    if publish is not None:
        await publish()  # At once: whoever opens their directory counts the batches.
    await service.close()
