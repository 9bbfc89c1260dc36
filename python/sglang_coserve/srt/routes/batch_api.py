"""Lines of batches inside SGLang's server: its own Batch API, and lines that a gateway sends.

Both are opened with the server's event loop, and closed with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI

from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.record import EXPORTED_STATES
from sglang_coserve.batch.routes import add_batch_routes, operator_endpoints
from sglang_coserve.batch.routes.caller import set_admin_key, set_not_ready, set_service
from sglang_coserve.batch.service import BatchService
from sglang_coserve.batch.webhooks import Webhooks, WebhookTarget
from sglang_coserve.config import CoserveConfig
from sglang_coserve.http_lines.line_server import (
    LineServer,
    add_line_routes,
    line_endpoints,
    set_line_server,
)
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.srt import compat
from sglang_coserve.srt.routes.drain import Drain, install_drain_routes, set_drain
from sglang_coserve.srt.routes.engine_routes import install_trace_route

if TYPE_CHECKING:
    from sglang_coserve.srt.batch_backend import BatchBackend

_POLL_S: Final = 0.2

logger = logging.getLogger(__name__)


def check_batch_settings(config: CoserveConfig) -> None:
    """Check, before the model is loaded, that the Batch API will be able to start.

    Raises:
        StartupError: the data directory cannot be used.
        ConfigError: the webhook's address or secret cannot be used.
    """
    WebhookTarget.of(config)
    if config.coserve_data_dir is not None:
        asyncio.run(BatchService.check(Path(config.coserve_data_dir)))


def install_batch_api(
    http_server: Any, admin_api_key: str | None, background: TaskSupervisor
) -> None:
    """Add the Batch API's routes to SGLang's app, and run its service while the server runs.

    ``background`` runs the tasks of the service.
    """
    app: FastAPI = http_server.app
    add_batch_routes(app)
    add_line_routes(app)
    drain = install_drain_routes(app)
    trace = install_trace_route(http_server)
    if admin_api_key:
        from sglang.srt.utils.auth import AuthLevel, auth_level

        set_admin_key(app, admin_api_key)
        # Else SGLang would let nobody pass who has not --api-key. Without an admin key the
        # routes say so themselves, and SGLang need not look at every request.
        for endpoint in (*operator_endpoints(), *line_endpoints(), *drain, trace):
            auth_level(AuthLevel.ADMIN_FORCE)(endpoint)
    stock_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[Any]:
        async with AsyncExitStack() as stack:
            # The service starts first, so that its errors stop the start before the warm-up.
            config: CoserveConfig = app.server_args._coserve  # type: ignore[attr-defined]
            if config.coserve_data_dir is not None or admin_api_key:
                await stack.enter_async_context(_served(http_server, config, background))
            yield await stack.enter_async_context(stock_lifespan(app))

    app.router.lifespan_context = lifespan


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
async def _served(
    http_server: Any, config: CoserveConfig, background: TaskSupervisor
) -> AsyncGenerator[None]:
    backend = await _backend(http_server, config)
    lines = LineServer(backend)
    set_line_server(http_server.app, lines)
    manager = http_server._global_state.tokenizer_manager
    args = compat.settings_of(manager.server_args)
    # Once: Prometheus takes no metric twice, and the service is opened again after a drain.
    exporter = BatchExporter(args.served_model_name) if args.enable_metrics else None
    open_service = partial(_open_service, http_server, config, backend, background, exporter)
    drain = Drain(manager, lines, open_service)
    await drain.end()
    set_drain(http_server.app, drain)
    stopping = background.start("drain_at_stop", partial(_drain_when_stopping, backend, drain))
    try:
        yield
    finally:
        if not backend.is_stopping:
            stopping.cancel()
        await asyncio.wait({stopping})
        await drain.start()


async def _backend(http_server: Any, config: CoserveConfig) -> BatchBackend:
    from sglang_coserve.srt.batch_backend import BatchBackend
    from sglang_coserve.srt.monitoring.scheduler_query import EXPECTED_RATE_KEY, STATE_KEY

    state = http_server._global_state
    manager = state.tokenizer_manager
    return BatchBackend(
        manager,
        state.template_manager,
        fingerprint=await manager.coserve_fingerprint(),
        moves_kv=config.kv_move_dir is not None,
        expected_tokens_per_s=state.scheduler_info[STATE_KEY][EXPECTED_RATE_KEY],
    )


async def _open_service(
    http_server: Any,
    config: CoserveConfig,
    backend: BatchBackend,
    background: TaskSupervisor,
    exporter: BatchExporter | None,
    stack: AsyncExitStack,
) -> None:
    """Open the Batch API for as long as ``stack``, if the server has one."""
    from sglang_coserve.guard.process_health import fatal_signals_recorded_in

    if config.coserve_data_dir is None:
        return
    target = WebhookTarget.of(config)
    service = await BatchService.open(
        Path(config.coserve_data_dir),
        backend,
        BatchLimits.of(config),
        record_events=target is not None,
        background=background,
    )
    set_service(http_server.app, service)
    stack.push_async_callback(_close, http_server.app, service)
    stack.enter_context(fatal_signals_recorded_in(service.fatal_signal_path))
    http_server._global_state.tokenizer_manager.coserve_on_death = service.note_engine_death
    if exporter is not None:
        await stack.enter_async_context(batches_exported(service, exporter))
    if target is not None:
        await stack.enter_async_context(Webhooks(service, target))


async def _drain_when_stopping(backend: BatchBackend, drain: Drain) -> None:
    """Drain when the server is told to stop.

    SGLang waits for all requests, including lines in flight, before it shuts its app down.
    """
    while not backend.is_stopping:
        await asyncio.sleep(_POLL_S)
    logger.info("batches stop where they are; the next start continues them")
    await drain.start()


async def _close(app: FastAPI, service: BatchService) -> None:
    set_not_ready(app, "the server is draining: its batches continue when it starts again")
    await service.close()


_INTERVAL_S: Final = 1.0


class BatchExporter:
    """Publishes the state of the service; one exporter a process, that of the HTTP server."""

    def __init__(self, model_name: str) -> None:
        # SGLang sets where the processes of a server leave their metrics before the first import.
        from prometheus_client import Gauge

        def gauge(name: str, text: str, *labels: str) -> Any:
            names = ("model_name", *labels)
            return Gauge(f"coserve_{name}", text, names, multiprocess_mode="mostrecent")

        self._model_name = model_name
        states = ", ".join((*EXPORTED_STATES, "paused"))
        self._batches = gauge(
            "batches", f"Unfinished batches: {states}; 0 while the engine drains.", "state"
        )
        self._waiting = gauge(
            "batch_lines_waiting", "Lines of batches that are not in the engine yet."
        )
        self._required = gauge(
            "batch_required_tokens_per_second",
            "What unfinished batches need to be complete within their windows.",
        )

    def publish(
        self, states: Mapping[str, int], lines_waiting: int, required_tokens_per_s: float
    ) -> None:
        """Publish a moment of the service."""
        name = self._model_name
        for state in (*EXPORTED_STATES, "paused"):
            self._batches.labels(name, state).set(states.get(state, 0))
        self._waiting.labels(name).set(lines_waiting)
        self._required.labels(name).set(required_tokens_per_s)


@asynccontextmanager
async def batches_exported(service: BatchService, exporter: BatchExporter) -> AsyncGenerator[None]:
    """Within it, ``exporter`` publishes how ``service`` stands, once a second; then, nothing."""
    try:
        async with service.background.running("batch_metrics", lambda: _publish(service, exporter)):
            yield
    finally:
        exporter.publish({}, 0, 0.0)  # Whoever opens their directory counts them.


async def _publish(service: BatchService, exporter: BatchExporter) -> None:
    while True:
        status, headroom = await service.status(), service.headroom()
        states = {**status.batches, "paused": status.paused_batches}
        exporter.publish(states, status.lines_waiting, headroom.required_tokens_per_s)
        await asyncio.sleep(_INTERVAL_S)
