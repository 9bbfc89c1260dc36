"""The gateway as an application: the routes of the Batch API on a fleet."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_coserve.batch.api import add_batch_routes, event_delivery
from sglang_coserve.batch.context import EventDelivery
from sglang_coserve.batch.data_directory import InUseError
from sglang_coserve.batch.errors import BatchApiOffError
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.routes.service import (
    batch_api_status,
    find_service,
    set_not_ready,
    set_service,
    take_over,
)
from sglang_coserve.batch.routes.view import PAGE_PATH, VIEW_PATH, Keys, shown_batches, view_answer
from sglang_coserve.batch.service import BatchService
from sglang_coserve.errors import CoserveError, RequestError, StorageError
from sglang_coserve.fleet.backend import FleetBackend
from sglang_coserve.fleet.discovery import follow
from sglang_coserve.fleet.options import GatewayOptions
from sglang_coserve.fleet.report import EngineViews, fleet_metrics, fleet_status
from sglang_coserve.fleet.served_model import keep_remembered, model_routes, remembered
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.logs import RequestIdMiddleware
from sglang_coserve.view.page import Page
from sglang_coserve.view.standing import fleet_standing
from sglang_coserve.view.verdict import LEVELS
from sglang_coserve.web.asgi import (
    FramingMiddleware,
    UnreadBodyMiddleware,
    openai_error,
    send_error,
)
from sglang_coserve.web.keys import bearer_key, is_same_key, set_admin_key, set_one_owner

_STANDBY_S: Final = 0.5
"""How often a standby gateway tries to take the directory over."""

_SERVED: Final = (
    "a gateway serves files, batches and responses in the background: send online requests to the"
    " router before the engines"
)

_log = logging.getLogger(__name__)


_OPEN: Final = ("/health", "/ping", "/metrics", PAGE_PATH, VIEW_PATH)
"""The page holds nothing of the gateway; the view checks keys itself: operators see more of it."""

_OPERATORS: Final = ("/coserve/batches", "/coserve/owners")
"""Have a key of their own, which the routes check."""


_ASK_FOR_KEY = "send the gateway's --api-key or --admin-api-key as a bearer token"


def view_routes(keys: Keys) -> APIRouter:
    """Return the routes; ``keys`` says who sees what."""
    router, page, views = APIRouter(), Page.assemble(), EngineViews()

    @router.get(PAGE_PATH, include_in_schema=False)
    async def show_page() -> Response:
        return Response(page.html, headers=page.headers)

    @router.get(VIEW_PATH)
    async def view_fleet(request: Request) -> Response:
        """Say how engines, their online users and batches stand."""
        caller = keys.caller(request.headers.raw)
        if caller is None:
            return view_answer(401, {"error": {"message": _ASK_FOR_KEY}})
        answer = await _view(request.app.state.fleet, views)
        return view_answer(200, answer | await shown_batches(request.app, caller))

    return router


async def _view(fleet: FleetBackend, views: EngineViews) -> dict[str, Any]:
    users_of = {
        url: msgspec.to_builtins(users)
        for url, users in (await views.online_users(fleet.engines)).items()
        if users.level in LEVELS  # A newer engine may know others.
    }
    status = fleet_status(fleet)
    engines = status.pop("engines")
    return {
        "at": time.time(),
        "model": fleet.engines.served.name or None,
        "online_users": fleet_standing(users_of),
        "fleet": status | {"offline_tokens_per_s": fleet.load().offline_tokens_per_s},
        "engines": [each | {"online_users": users_of.get(each["url"])} for each in engines],
    }


class KeyCheck:
    """An ASGI middleware: refuses who does not bring ``api_key``."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            try:
                key = bearer_key(scope["headers"])
            except RequestError as error:
                await send_error(send, 400, str(error))
                return
            if not is_same_key(key, self._api_key):
                await send_error(send, 401, "send the gateway's --api-key as a bearer token")
                return
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        is_operators = any(f"{path}/".startswith(f"{each}/") for each in _OPERATORS)
        return path.rstrip("/") in _OPEN or is_operators


def gateway_app(options: GatewayOptions, on_failure: Callable[[CoserveError], None]) -> FastAPI:
    """Return the application of a gateway.

    Its port is open from the start; the routes of batches say what is missing until the data
    directory is free. ``on_failure`` is called with what makes that impossible.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        background = app.state.background = TaskSupervisor()
        async with AsyncExitStack() as stack:
            fleet = app.state.fleet = await stack.enter_async_context(
                _fleet_of(options, background)
            )
            fleet.engines.served = await asyncio.to_thread(remembered, options.data)
            opened = await stack.enter_async_context(AsyncExitStack())
            for name, work in (
                ("engine_discovery", partial(follow, options.sources, fleet.engines.set_listed)),
                ("batch_api_start", partial(_open, app, options, fleet, opened, on_failure)),
            ):
                await stack.enter_async_context(background.running(name, work))
            yield

    app = FastAPI(title="coserve gateway", lifespan=lifespan)
    app.add_exception_handler(HTTPException, _refuse)
    set_not_ready(app, "the gateway is starting")
    add_batch_routes(app)
    if options.admin_api_key:
        set_admin_key(app, options.admin_api_key)
    app.add_api_route("/ping", _ping)
    app.add_api_route("/health", _health)
    app.add_api_route("/coserve/status", _status)
    app.add_api_route("/metrics", _metrics)
    app.router.routes.extend(view_routes(Keys(options.api_key, options.admin_api_key)).routes)
    served = model_routes(lambda request: request.app.state.fleet.engines.served)
    app.router.routes.extend(served.routes)
    # Gets what the routes of responses in the background, if there are any, leave to those behind.
    app.add_api_route("/v1/responses", _misdirected, methods=["POST"], include_in_schema=False)
    if options.api_key:
        set_one_owner(app)
        app.add_middleware(KeyCheck, api_key=options.api_key)
    # Those added last come first.
    app.add_middleware(UnreadBodyMiddleware)
    app.add_middleware(FramingMiddleware)
    app.add_middleware(RequestIdMiddleware)
    return app


def _fleet_of(options: GatewayOptions, background: TaskSupervisor) -> FleetBackend:
    """Return the engines of a gateway, or the router in their place."""
    if options.router is None:
        return FleetBackend(options.engine_key, background=background)
    router = options.make_router()
    fleet = FleetBackend("", routers=[router], background=background)
    fleet.engines.set_listed([router.url])
    return fleet


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer what has no route here."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}; {_SERVED}"
    return JSONResponse(openai_error(error.status_code, message), error.status_code, error.headers)


async def _open(
    app: FastAPI,
    options: GatewayOptions,
    fleet: FleetBackend,
    opened: AsyncExitStack,
    on_failure: Callable[[CoserveError], None],
) -> None:
    """Open the Batch API as soon as that is possible, for as long as ``opened``."""
    try:
        delivery = event_delivery(options)
        async with AsyncExitStack() as stack:
            service = await _open_when_free(app, options, fleet, delivery)
            stack.push_async_callback(_close, app, service)
            await take_over(service, options.api_key)
            keep = partial(keep_remembered, options.data, lambda: fleet.engines.served)
            background = app.state.background
            await stack.enter_async_context(background.running("served_model", keep))
            opened.push_async_exit(stack.pop_all())
    except CoserveError as error:
        on_failure(error)
        return
    set_service(app, service)
    _log.warning("batches in %s are served", options.data)


async def _open_when_free(
    app: FastAPI, options: GatewayOptions, fleet: FleetBackend, delivery: EventDelivery | None
) -> BatchService:
    limits, is_standby = BatchLimits.of(options), False
    while True:
        try:
            return await BatchService.open(
                options.data,
                fleet,
                limits,
                event_delivery=delivery,
                dies_with_engine=False,
                background=app.state.background,
            )
        except InUseError:
            if not is_standby:
                is_standby = True
                waits = "this one stands by until that ends"
                _log.warning("another gateway has %s: %s", options.data, waits)
                set_not_ready(app, f"another gateway has the data directory: {waits}")
        await asyncio.sleep(_STANDBY_S)


async def _close(app: FastAPI, service: BatchService) -> None:
    set_not_ready(app, "the gateway is stopping: its batches continue when it starts again")
    await service.close()


async def _misdirected() -> None:
    """Refuse a response that is not in the background; a proxy may send it to the router then."""
    raise HTTPException(HTTPStatus.MISDIRECTED_REQUEST, "not in the background")


async def _ping() -> dict[str, str]:
    """Say that the process is there, also while it stands by."""
    return {}


async def _health(request: Request) -> Response:
    """Say whether batches are served here: 200, or 503 with the reason."""
    try:
        find_service(request.app)
    except BatchApiOffError as error:
        return JSONResponse({"not_ready": str(error)}, HTTPStatus.SERVICE_UNAVAILABLE)
    return JSONResponse({})


async def _status(request: Request) -> dict[str, Any]:
    """Say how the engines and the batches stand."""
    return {
        "fleet": fleet_status(request.app.state.fleet),
        "batch_api": await batch_api_status(request.app),
        "background": request.app.state.background.state(),
    }


async def _metrics(request: Request) -> Response:
    """Say the same in numbers, for Prometheus."""
    status, required_per_s = None, 0.0
    with suppress(BatchApiOffError, StorageError):
        service = find_service(request.app)
        status, required_per_s = await service.status(), service.headroom().required_tokens_per_s
    state = request.app.state
    content = fleet_metrics(state.fleet, status, required_per_s, state.background.state())
    return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")
