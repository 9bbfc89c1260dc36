"""The engine's load, ``/coserve/load``, and the operator's page.

Gateways and autoscalers read the load. The page (``/coserve``) and its figures (``/coserve/view``)
are served before SGLang checks keys. A browser cannot send a key with the address of a page, so the
page itself holds nothing of the server. The figures depend on the key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_coserve import __version__
from sglang_coserve.batch.routes.view import PAGE_PATH, VIEW_PATH, Keys, shown_batches, view_answer
from sglang_coserve.http_lines.engine_load import EngineLoad, ReplicaLoad, Versions, total
from sglang_coserve.http_lines.messages import LOAD_PATH
from sglang_coserve.srt import compat
from sglang_coserve.srt.batch_backend.loaded_model import (
    kv_fingerprint,
    kv_format,
    model_in_use,
    model_names,
)
from sglang_coserve.srt.monitoring.scheduler_query import STANDING, ask
from sglang_coserve.srt.monitoring.told_settings import told
from sglang_coserve.srt.routes.drain import Health
from sglang_coserve.srt.routes.step_routes import STEPS_PATH, TRACE_PATH
from sglang_coserve.view.page import Page
from sglang_coserve.view.standing import History, standing
from sglang_coserve.web.asgi import route_path, send_error

INFO_PATHS: Final = ("/server_info", "/get_server_info")


def add_info_routes(http_server: Any) -> None:
    """Replace SGLang's routes for settings, which tell both keys to whoever has one."""
    app: FastAPI = http_server.app

    async def server_info() -> Any:
        """Say what the server was started with, and how its schedulers stand."""
        return told(await http_server.server_info())

    app.router.routes[:] = [
        each for each in app.routes if getattr(each, "path", None) not in INFO_PATHS
    ]
    for path in INFO_PATHS:
        app.add_api_route(path, server_info, methods=["GET"])


def add_load_route(http_server: Any, health: Health) -> None:
    """Add the route to SGLang's app, behind the admin key where there is one."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def load() -> EngineLoad:
        """Say how loaded all replicas are, by class, and what they serve."""
        manager = http_server._global_state.tokenizer_manager
        return await _engine_load(manager, is_draining=health.is_draining)

    http_server.app.add_api_route(LOAD_PATH, load, methods=["GET"])


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
        is_draining=is_draining,
        model_name=args.served_model_name,
        models=model_names(manager),
        model=model,
        kv_fingerprint=kv_fingerprint(model, kv),
        kv_format=kv,
        versions=Versions(
            sglang_coserve=__version__, sglang=compat.installed_version() or "unknown"
        ),
    )


_DECISION: Final = ("subject", "text", "steps", "span_s")
_ENGINE: Final = ("online", "offline", "cache", "kv_tokens", "work", "safepoints", "prediction")


_INTERVAL_S: Final = 1.0


class View:
    """The two routes, and the samples behind them."""

    def __init__(self, http_server: Any, keys: Keys) -> None:
        """``http_server`` is SGLang's module of that name."""
        self._http_server = http_server
        self._keys = keys
        self._page = Page.assemble()
        self._history = History()
        self._router = Router(
            [
                Route(PAGE_PATH, self._serve_page, methods=["GET"]),
                Route(f"{PAGE_PATH}/", self._serve_page_address, methods=["GET"]),
                Route(VIEW_PATH, self._serve_view, methods=["GET"]),
            ]
        )

    def install(self, app: FastAPI) -> None:
        """Have ``app`` serve the routes, before all middleware."""
        build_stack = app.build_middleware_stack

        def build_with_view() -> ASGIApp:
            return _InFront(self._router, build_stack())

        app.build_middleware_stack = build_with_view  # type: ignore[method-assign]

    async def sample(self) -> None:
        """Follow the schedulers, for ever.

        One that does not answer is waited for: the age of the last sample shows it.
        """
        while True:
            states = await ask(self._http_server._global_state.tokenizer_manager, STANDING)
            self._history.add(time.time(), states)
            await asyncio.sleep(_INTERVAL_S)

    async def _serve_page(self, _request: Request) -> Response:
        return Response(self._page.html, headers=self._page.headers)

    async def _serve_page_address(self, _request: Request) -> Response:
        return RedirectResponse("../coserve")

    async def _serve_view(self, request: Request) -> Response:
        caller = self._keys.caller(request.headers.raw)
        if caller is None:
            return _error(401, "send the server's --api-key or --admin-api-key as a bearer token")
        try:
            since_s = float(request.query_params.get("since", "0"))
        except ValueError:
            return _error(400, "since: must be seconds since the epoch")
        batches = await shown_batches(self._http_server.app, caller)
        paths = {"trace": TRACE_PATH, "steps": STEPS_PATH}
        shown = {name: path if caller.is_operator else None for name, path in paths.items()}
        return view_answer(200, self._view(since_s) | shown | batches)

    def _view(self, since_s: float) -> dict[str, Any]:
        now_s, history = time.time(), self._history
        manager = self._http_server._global_state.tokenizer_manager
        replicas = history.latest
        return {
            "at": now_s,
            "sample_age_s": now_s - history.latest_at_s if replicas else None,
            "model": manager.served_model_name,
            "policy": manager.server_args._coserve.offline_policy,
            "online_users": standing(replicas, history.cache()) | {"bill": history.bill()},
            "offline_stopped_by": _stopped_by(replicas),
            "replicas": [{name: r[name] for name in _ENGINE if name in r} for r in replicas],
            "decisions": _decisions(history),
            "history": history.columns(since_s),
        }


class _InFront:
    """Serves what the router knows, and leaves the rest to ``app``."""

    def __init__(self, router: Router, app: ASGIApp) -> None:
        self._router = router
        self._app = app
        self._paths = frozenset(route.path for route in router.routes if isinstance(route, Route))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (path := route_path(scope)) in self._paths:
            if scope["method"] not in ("GET", "HEAD"):
                await send_error(send, 405, f"{path} is only read: use GET")
                return
            await self._router(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _stopped_by(replicas: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the error that stopped offline work; None while every replica serves it."""
    errors = (replica["offline"]["stopped_by"] for replica in replicas)
    return next((error for error in errors if error is not None), None)


def _decisions(history: History) -> list[dict[str, Any]]:
    """Return what was decided, the newest first, with the time of each."""
    at_s = history.latest_at_s
    found = [
        {"at": at_s - each["age_s"], **{name: each[name] for name in _DECISION}}
        for replica in history.latest
        for each in replica.get("decisions", ())
    ]
    return sorted(found, key=lambda decision: -decision["at"])


def _error(status: int, message: str) -> Response:
    return view_answer(status, {"error": {"message": message}})
