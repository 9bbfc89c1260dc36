"""Decides on every route of SGLang's app: its callers, its work, and its bound.

``decide`` takes routes without a decision out of the app, and gives the others the key that the
table names. ``RouteGate`` then refuses what the app has no route for, before SGLang counts it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_coserve.errors import RequestError
from sglang_coserve.web.asgi import ENGINE_PATHS, known_paths, openai_error, route_path, send_json
from sglang_coserve.web.keys import bearer_key, is_same_key

logger = logging.getLogger(__name__)


class Caller(Enum):
    """Callers that a route is for."""

    ANYBODY = "anybody"
    CLIENT = "a client with the API key; anybody where there is none"
    MANAGER = "who has the admin key; without one, a client"
    OPERATOR = "who has the admin key; nobody without one"


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision on the routes at ``paths``."""

    caller: Caller
    paths: tuple[str, ...]
    work: str
    """Their work, and its place."""

    bound: str


DECISIONS: Final = (
    Decision(
        Caller.ANYBODY,
        ("/ping",),
        "says that the process lives, and its event loop runs",
        "none needed",
    ),
    Decision(
        Caller.ANYBODY,
        ("/health", "/ready"),
        "read what the schedulers last said, on the event loop",
        "none needed",
    ),
    Decision(Caller.ANYBODY, ("/health_generate",), "generates in the engine", "one token"),
    Decision(
        Caller.ANYBODY,
        ("/metrics",),
        "writes all series, on the event loop",
        "a request cannot add a series: only known routes are counted",
    ),
    Decision(
        Caller.CLIENT,
        ENGINE_PATHS,
        "send requests to the engine; large prompts are tokenized and rendered in threads",
        "limits of bodies, the check of every request, 0.25 s of CPU to read tool calls",
    ),
    Decision(
        Caller.CLIENT,
        ("/v1/realtime",),
        "a WebSocket whose sounds go to the engine",
        "the check of every request",
    ),
    Decision(
        Caller.CLIENT,
        ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/messages/count_tokens"),
        "tokenize, in a thread",
        "limits of bodies",
    ),
    Decision(
        Caller.CLIENT,
        ("/parse_function_call", "/separate_reasoning"),
        "read a text with a parser that the client names, on the event loop",
        "limits of bodies, 0.25 s of CPU",
    ),
    Decision(
        Caller.CLIENT,
        ("/server_info", "/get_server_info"),
        "read settings and the schedulers' state",
        "numbers, switches, choices and named settings: any other text is starred out",
    ),
    Decision(
        Caller.CLIENT,
        (
            *("/", "/v1/models", "/v1/models/{model:path}", "/api/tags", "/api/show"),
            *("/model_info", "/get_model_info", "/weight_version", "/get_weight_version"),
            *("/v1/loads", "/get_load", "/get_hicache_l3_cache_layout"),
        ),
        "read what is served and how loaded it is",
        "a small answer",
    ),
    Decision(
        Caller.CLIENT,
        ("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
        "read or cancel a response that SGLang keeps",
        "SGLang keeps none, unless with --enable-response-store or in a version without that flag",
    ),
    Decision(
        Caller.CLIENT,
        ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"),
        "describe the routes",
        "made once",
    ),
    Decision(
        Caller.MANAGER,
        (
            *("/abort_request", "/pause_generation", "/continue_generation", "/slow_down"),
            *("/flush_cache", "/freeze_gc", "/configure_logging", "/set_trace_level"),
            *("/set_internal_state", "/dumper/{method}", "/weights_checker", "/pd_role_switch"),
            *("/start_profile", "/stop_profile", "/scale_elastic_ep", "/is_scaling_elastic_ep"),
            *("/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"),
            *("/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter"),
            *("/begin_weight_update", "/end_weight_update", "/update_weight_version"),
            *("/update_weights_from_disk", "/update_weights_from_tensor"),
            *("/update_weights_from_distributed", "/update_weights_from_ipc"),
            *("/init_weights_update_group", "/destroy_weights_update_group"),
            "/init_weights_send_group_for_remote_instance",
            *("/send_weights_to_remote_instance", "/get_weights_by_name"),
            "/get_remote_instance_transfer_engine_info",
            "/remote_instance_transfer_engine_info",
            *("/release_memory_occupation", "/resume_memory_occupation"),
            *("/start_expert_distribution_record", "/stop_expert_distribution_record"),
            "/dump_expert_distribution_record",
            *("/hicache/storage-backend", "/hicache/storage-backend/clear"),
            "/clear_hicache_storage_backend",
        ),
        "manage the engine",
        "none: trusted",
    ),
    Decision(
        Caller.OPERATOR,
        ("/open_session", "/close_session"),
        "begin and end sessions; the scheduler keeps every request of one until it ends",
        "none: trusted",
    ),
)
"""Decisions on all routes of all supported versions of SGLang."""


def decision_on(path: str) -> Decision | None:
    """Return the decision on the route with this path, as SGLang writes it; None without one."""
    return _BY_PATH.get(path)


_BY_PATH: Final[Mapping[str, Decision]] = {
    path: decision for decision in DECISIONS for path in known_paths(decision.paths)
}


def leaves(routes: Iterable[Any]) -> Iterator[Any]:
    """Yield the routes, with the routes of an included router in its place.

    SGLang looks for the key of a route at the route itself, and finds none at such a router.
    """
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is None:
            yield route
        else:
            yield from leaves(inner.routes)


def decide(app: Any, *, has_admin_key: bool) -> None:
    """Leave only routes with a decision in SGLang's app, each with the key of its decision."""
    from sglang.srt.utils.auth import AuthLevel

    operator = AuthLevel.ADMIN_FORCE if has_admin_key else AuthLevel.NORMAL
    levels = {Caller.MANAGER: AuthLevel.ADMIN_OPTIONAL, Caller.OPERATOR: operator}
    kept = []
    for route in leaves(app.router.routes):
        decision = decision_on(route.path)
        if decision is None:
            logger.warning("%s is not served: co-serving does not know this route", route.path)
            continue
        route.endpoint._auth_level = levels.get(decision.caller, AuthLevel.NORMAL)
        kept.append(route)
    app.router.routes[:] = kept


_OURS: Final = __name__.partition(".")[0] + "."
_READ: Final = frozenset({"GET", "HEAD"})


class RouteGate:
    """ASGI middleware that lets nothing through but what a route of the app takes.

    All else is answered with 404 or 405: routes that came later, too, unless they are ours or have
    a decision. Without an admin key, the operator's routes of the table answer 403. A WebSocket
    needs the API key, for which SGLang does not ask.
    """

    def __init__(
        self, app: ASGIApp, *, api: Any, api_key: str | None, admin_api_key: str | None
    ) -> None:
        """``api`` is the FastAPI application, which has all its routes at the first request."""
        self._app = app
        self._api = api
        self._api_key = api_key
        self._has_admin_key = bool(admin_api_key)
        self._fixed: dict[str, frozenset[str]] = {}
        self._patterns: list[tuple[re.Pattern[str], frozenset[str]]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "websocket" and not self._has_key(scope):
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "send the --api-key"})
            return
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            status, message, code = refusal
            await send_json(send, status, openai_error(status, message, code))
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        try:
            return not self._api_key or is_same_key(bearer_key(scope["headers"]), self._api_key)
        except RequestError:
            return False

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        path, method = route_path(scope), scope["method"]
        methods = self._methods(path)
        if not methods:
            return 404, f"there is no route {path[:200]!r}: see /openapi.json", "not_found"
        if method not in methods:
            allowed = ", ".join(sorted(methods))
            return 405, f"{path[:200]} takes {allowed}: use one of them", "method_not_allowed"
        decision = decision_on(path)
        is_operators = decision is not None and decision.caller is Caller.OPERATOR
        if is_operators and not self._has_admin_key:
            message = f"{path} is the operator's: start the server with --admin-api-key KEY"
            return 403, message, "no_admin_key"
        return None

    def _methods(self, path: str) -> frozenset[str]:
        """Return the methods with which there is a route at ``path``. O(1) for fixed paths."""
        if not self._fixed:
            self._read_routes()
        # Starlette redirects from a fixed path with a slash at its end.
        fixed = self._fixed.get(path) or self._fixed.get(path.removesuffix("/"))
        if fixed:
            return fixed
        found = (methods for pattern, methods in self._patterns if pattern.match(path))
        return frozenset().union(*found)

    def _read_routes(self) -> None:
        for route in leaves(self._api.routes):
            path, endpoint = route.path, getattr(route, "endpoint", None)
            module = getattr(endpoint, "__module__", "")
            if decision_on(path) is None and not module.startswith(_OURS):
                continue
            # A mounted application, such as the application of metrics, has no methods.
            methods = frozenset(getattr(route, "methods", None) or _READ)
            if "{" in path or endpoint is None:
                self._patterns.append((route.path_regex, methods))
            else:
                self._fixed[path] = self._fixed.get(path, frozenset()) | methods
