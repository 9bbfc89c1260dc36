"""``/coserve``, the operator's page, and ``/coserve/view``, what it shows.

Both are served before SGLang's own check of keys: a browser cannot send a key with the
address of a page, and what is shown depends on whose key it is. The page itself holds
nothing of the server.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from secrets import compare_digest
from typing import Any, Final

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route, Router

from sglang_coserve.asgi import App, Receive, Scope, Send, send_error
from sglang_coserve.batch import BatchObject, StorageError, owner_of
from sglang_coserve.batch.routes import BatchApiOffError, find_service
from sglang_coserve.srt.view_sampler import sampled
from sglang_coserve.view import History, Page, standing

__all__ = ["PAGE_PATH", "VIEW_PATH", "Caller", "Keys", "View"]

PAGE_PATH: Final = "/coserve"
VIEW_PATH: Final = "/coserve/view"

_BATCHES: Final = 50
"""So many of the newest are looked at; what is unfinished comes first."""

_SHOWN: Final = ("id", "endpoint", "status", "created_at", "expires_at", "completed_at", "metadata")
_DECISION: Final = ("subject", "text", "steps", "span_s")
_ENGINE: Final = ("online", "offline", "kv_tokens", "work", "safepoints", "prediction")


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf the view is asked for."""

    owner: str | None
    """Whose batches are shown; None: everybody's."""

    batches_path: str | None
    """Where they can be changed; None: they are not shown."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What opens the view."""

    api_key: str | None
    admin_api_key: str | None
    is_open: bool = False
    """Who brings no key sees the figures, and no batches."""

    def caller(self, key: str | None) -> Caller | None:
        """Return who brings ``key``; None: nobody whom the view is for."""
        if self.admin_api_key and key and _is_same(key, self.admin_api_key):
            return Caller(None, "/coserve/batches")
        if not self.api_key or (key and _is_same(key, self.api_key)):
            return Caller(owner_of(key), "/v1/batches")
        return Caller(None, None) if self.is_open and not key else None


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
        """Have ``app`` serve the routes, before all middleware, and sample while it runs."""
        build_stack = app.build_middleware_stack

        def build_with_view() -> App:
            return _InFront(self._router, build_stack())

        app.build_middleware_stack = build_with_view  # type: ignore[method-assign]
        stock_lifespan = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncGenerator[Any]:
            async with AsyncExitStack() as stack:
                entered = await stack.enter_async_context(stock_lifespan(app))
                manager = self._http_server._global_state.tokenizer_manager
                await stack.enter_async_context(sampled(manager, self._history))
                yield entered

        app.router.lifespan_context = lifespan

    async def _serve_page(self, _request: Request) -> Response:
        return Response(self._page.html, headers=self._page.headers)

    async def _serve_page_address(self, _request: Request) -> Response:
        return RedirectResponse("../coserve")

    async def _serve_view(self, request: Request) -> Response:
        caller = self._keys.caller(_bearer(request))
        if caller is None:
            return _error(401, "send the server's --api-key or --admin-api-key as a bearer token")
        try:
            since_s = float(request.query_params.get("since", "0"))
        except ValueError:
            return _error(400, "since: must be seconds since the epoch")
        answer = self._view(since_s) | await self._of_batches(caller)
        return _json(200, answer)

    def _view(self, since_s: float) -> dict[str, Any]:
        now_s, history = time.time(), self._history
        manager = self._http_server._global_state.tokenizer_manager
        replicas = history.latest
        return {
            "at": now_s,
            "sample_age_s": now_s - history.latest_at_s if replicas else None,
            "model": manager.served_model_name,
            "policy": manager.server_args._coserve.offline_policy,
            "online_users": standing(replicas) | {"bill": history.bill()},
            "replicas": [{name: r[name] for name in _ENGINE if name in r} for r in replicas],
            "decisions": _decisions(history),
            "history": history.columns(since_s),
        }

    async def _of_batches(self, caller: Caller) -> dict[str, Any]:
        """Return the caller's batches and what could be added to all; null while there is no
        Batch API."""
        try:
            service = find_service(self._http_server.app)
            found = []
            if caller.batches_path is not None:
                found = (await service.list_batches(caller.owner, limit=_BATCHES)).data
            return {
                "batches": {"path": caller.batches_path, "data": [_shown(each) for each in found]},
                "headroom": asdict(service.headroom()),
            }
        except BatchApiOffError:
            return {"batches": None, "headroom": None}
        except StorageError as error:
            return {"batches": {"path": None, "data": [], "error": str(error)}, "headroom": None}


class _InFront:
    """Serves what the router knows, and leaves the rest to ``app``."""

    def __init__(self, router: Router, app: App) -> None:
        self._router = router
        self._app = app
        self._paths = frozenset(route.path for route in router.routes if isinstance(route, Route))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and path in self._paths:
            if scope["method"] not in ("GET", "HEAD"):
                await send_error(send, 405, f"{path} is only read: use GET")
                return
            await self._router(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _decisions(history: History) -> list[dict[str, Any]]:
    """Return what was decided, the newest first, with the time of each."""
    at_s = history.latest_at_s
    found = [
        {"at": at_s - each["age_s"], **{name: each[name] for name in _DECISION}}
        for replica in history.latest
        for each in replica.get("decisions", ())
    ]
    return sorted(found, key=lambda decision: -decision["at"])


def _shown(batch: BatchObject) -> dict[str, Any]:
    fields = batch.model_dump(mode="json", include={*_SHOWN, "request_counts", "coserve"})
    return fields | {"total_tokens": batch.usage.total_tokens}


def _bearer(request: Request) -> str | None:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return (key or None) if scheme.lower() == "bearer" else None


def _is_same(key: str, expected: str) -> bool:
    return compare_digest(key.encode(), expected.encode())


def _error(status: int, message: str) -> Response:
    return _json(status, {"error": {"message": message}})


def _json(status: int, content: dict[str, Any]) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(orjson.dumps(content), status, headers, "application/json")
