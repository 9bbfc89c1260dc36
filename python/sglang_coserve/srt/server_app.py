"""Puts co-serving into SGLang's app: middleware, routes, and what runs as long as the server."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from sglang_coserve.batch.api import BATCH_PREFIXES, missing_routes
from sglang_coserve.batch.routes.service import batch_api_status
from sglang_coserve.batch.routes.view import Keys
from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import CoserveError, StartupError
from sglang_coserve.http_lines.messages import LINES_PATH
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.logs import RequestIdMiddleware
from sglang_coserve.network import check_listen_address
from sglang_coserve.srt import compat
from sglang_coserve.srt.batch_backend.loaded_model import model_names
from sglang_coserve.srt.marks.error_form import install_error_form
from sglang_coserve.srt.marks.marks_middleware import MarksMiddleware
from sglang_coserve.srt.marks.wanted_model import (
    WantedModelMiddleware,
    check_models_of_forms,
)
from sglang_coserve.srt.monitoring.exporter import ServerMetrics
from sglang_coserve.srt.monitoring.scheduler_query import STATE_KEY, replicas_info
from sglang_coserve.srt.optional_parts import GUARD
from sglang_coserve.srt.platform import Platform
from sglang_coserve.srt.process_health import freeze_imports
from sglang_coserve.srt.routes.batch_api import add_batch_api, open_routes_warning, served
from sglang_coserve.srt.routes.drain import Health, HealthMiddleware, Heartbeat
from sglang_coserve.srt.routes.engine_routes import View, add_info_routes, add_load_route
from sglang_coserve.srt.routes.probes import install_before_keys
from sglang_coserve.web.asgi import UnreadBodyMiddleware

logger = logging.getLogger(__name__)

STATUS_PATH: Final = "/coserve/status"


def verify_app(app: FastAPI) -> None:
    """Check that no route of SGLang's comes before one of the Batch API's.

    Raises:
        StartupError: one does.
    """
    if problems := missing_routes(app):
        raise StartupError(
            "co-serving is not in place: another route answers at " + ", ".join(problems)
        )


class Lifespan:
    """What runs as long as the server does, beside what SGLang starts itself.

    Before anything is started it is checked that co-serving is in place. The schedulers are queried
    for their internal state, because the controller of several replicas does not pass on their
    start-up information.
    """

    def __init__(
        self, http_server: Any, view: View, health: Health, background: TaskSupervisor
    ) -> None:
        """Install it into SGLang's ``http_server`` module."""
        self.failure: CoserveError | None = None
        """The error that stopped the start; Uvicorn only logs it."""

        self._http_server = http_server
        self._view = view
        self._health = health
        self._background = background
        router = http_server.app.router
        self._stock = router.lifespan_context
        router.lifespan_context = self._lifespan

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncGenerator[Any]:
        async with AsyncExitStack() as stack:
            try:
                entered = await self._start(app, stack)
            except CoserveError as error:
                self.failure = error
                raise
            yield entered

    async def _start(self, app: FastAPI, stack: AsyncExitStack) -> Any:
        server = self._http_server._global_state
        manager = server.tokenizer_manager
        verify_app(app)
        self._health.manager = manager
        states = await manager.get_internal_state()
        server.scheduler_info[STATE_KEY] = replicas_info(states)
        running: dict[str, Callable[[], Awaitable[None]]] = {"view_samples": self._view.sample}
        publish = None
        settings = compat.settings_of(manager.server_args)
        if settings.enable_metrics:
            metrics = ServerMetrics(app, settings.served_model_name, self._background)
            running["metrics"], publish = metrics.run, metrics.publish
        # The service starts first, so that its errors stop the start before the warm-up.
        await stack.enter_async_context(
            served(self._http_server, self._health, self._background, publish)
        )
        # Now, while the files are still those that were loaded.
        logger.info("the model's fingerprint is %s", await manager.coserve_fingerprint())
        self._health.heartbeat = heartbeat = Heartbeat(manager, self._health.stop_offline)
        await stack.enter_async_context(self._background.running("heartbeat", heartbeat.run))
        entered = await stack.enter_async_context(self._stock(app))
        for name, work in running.items():
            await stack.enter_async_context(self._background.running(name, work))
        return entered


def install_in_app(http_server: Any, server_args: Any, platform: Platform) -> None:
    """Add our middleware and routes to SGLang's app, and a check before the port is opened."""

    async def status() -> dict[str, Any]:
        """Return the state of each data-parallel replica and of the Batch API."""
        manager = http_server._global_state.tokenizer_manager
        states = await manager.get_internal_state()
        return {
            "replicas": [state["coserve"] for state in states],
            "batch_api": await batch_api_status(app),
            "background": background.state(),
            "emulated": platform.emulated,
        }

    app = http_server.app
    config: CoserveConfig = server_args._coserve
    background, health = TaskSupervisor(), Health()

    def names() -> Sequence[str]:
        return model_names(http_server._global_state.tokenizer_manager)

    keys = {"api_key": server_args.api_key, "admin_api_key": server_args.admin_api_key}
    GUARD.close_routes(app, **keys)
    app.add_middleware(
        MarksMiddleware,
        offline_objectives=config.offline_objectives,
        offline_priority_below=config.offline_priority_below,
    )
    check_models_of_forms(app, names)
    # The middleware added last runs first.
    app.add_middleware(WantedModelMiddleware, names=names)
    # Before our routes are there, which read little.
    GUARD.install_in_server(
        http_server,
        free_prefixes=(*BATCH_PREFIXES, LINES_PATH),
        trusts_templates=compat.trusts_request_templates(server_args),
    )
    app.add_middleware(UnreadBodyMiddleware)
    compat.mend_routes()
    app.add_middleware(HealthMiddleware, health=health)
    app.add_middleware(RequestIdMiddleware)
    install_before_keys(app)
    app.add_api_route(STATUS_PATH, status, methods=["GET"])
    add_info_routes(http_server)
    add_load_route(http_server, health)
    add_batch_api(http_server, health, server_args.api_key, server_args.admin_api_key)
    view = View(http_server, Keys(**keys, is_open=config.open_view))
    view.install(app)
    order_middleware(app)
    install_error_form(app)
    lifespan = Lifespan(http_server, view, health, background)

    def verify_and_serve(
        server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any
    ) -> None:
        logger.info(compat.start_up_line())
        open_routes = open_routes_warning(server_args.api_key, server_args.admin_api_key)
        for warning in (platform.warning, open_routes):
            if warning is not None:
                logger.warning(warning)
        # Again, because another process may have taken the port while the model was loaded.
        check_listen_address(server_args.host, server_args.port)
        freeze_imports()
        try:
            serve(server_args, tokenizer_manager, *args, **kwargs)
        finally:
            if lifespan.failure is not None:
                raise lifespan.failure

    serve = compat.replace(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server", verify_and_serve
    )


def order_middleware(app: Any) -> None:
    """Let middlewares run in order, whenever SGLang adds its own.

    SGLang's metrics see no request that the guard's gate does not let through. Middlewares that are
    ``is_before_keys`` run before SGLang's check of keys, which is added when the server starts. A
    browser's preflight (``OPTIONS``) is answered at any path, before the gate and the metrics.
    """
    build_stack = app.build_middleware_stack

    def build_in_order() -> ASGIApp:
        # The first one runs first, and sorting keeps the order of middlewares of one rank.
        app.user_middleware.sort(key=_rank)
        stack: ASGIApp = build_stack()
        return stack

    app.build_middleware_stack = build_in_order


def _rank(middleware: Any) -> int:
    if middleware.cls is CORSMiddleware:
        return 0
    if getattr(middleware.cls, "is_before_keys", False):
        return 1
    return 3 if middleware.cls.__module__ == _METRICS_MODULE else 2


_METRICS_MODULE: Final = "sglang.srt.utils.http_middleware_patch"
