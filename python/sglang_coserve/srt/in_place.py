"""Verifies that co-serving is installed in every process before the server's port is opened."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI

from sglang_coserve.batch.routes import missing_routes
from sglang_coserve.errors import CoserveError, StartupError
from sglang_coserve.guard.install import MIDDLEWARE
from sglang_coserve.http_lines.messages import LINES_PATH
from sglang_coserve.srt.marks.marks_middleware import MarksMiddleware
from sglang_coserve.srt.marks.wanted_model import WantedModelMiddleware
from sglang_coserve.srt.monitoring.scheduler_query import STATE_KEY, replicas_info
from sglang_coserve.srt.routes.drain import DRAIN_PATH, HealthMiddleware
from sglang_coserve.srt.routes.engine_routes import LOAD_PATH

__all__ = ["STATUS_PATH", "StartCheck", "verify_app"]

STATUS_PATH: Final = "/coserve/status"


class StartCheck:
    """Checks a server at the beginning of its app's lifespan.

    The schedulers are queried for their internal state, because the controller of several
    replicas does not pass on their start-up information.
    """

    def __init__(self, http_server: Any) -> None:
        """Install the check into the lifespan of SGLang's ``http_server`` module."""
        self.failure: CoserveError | None = None
        """The error that stopped the start; Uvicorn only logs it."""
        router = http_server.app.router
        inner = router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncGenerator[Any]:
            async with AsyncExitStack() as stack:
                try:
                    verify_app(app)
                    server = http_server._global_state
                    states = await server.tokenizer_manager.get_internal_state()
                    server.scheduler_info[STATE_KEY] = replicas_info(states)
                    entered = await stack.enter_async_context(inner(app))
                except CoserveError as error:
                    self.failure = error
                    raise
                yield entered

        router.lifespan_context = lifespan


def verify_app(app: FastAPI) -> None:
    """Check that our middleware and routes are installed in an app.

    Raises:
        StartupError: a middleware or a route is missing.
    """
    installed: set[Any] = {entry.cls for entry in app.user_middleware}
    problems = [
        f"{middleware.__name__} is not installed"
        for middleware in (
            *(MarksMiddleware, WantedModelMiddleware),
            *(*MIDDLEWARE, HealthMiddleware),
        )
        if middleware not in installed
    ]
    paths = {getattr(route, "path", None) for route in app.routes}
    problems += [
        f"the route {path} is not installed"
        for path in (STATUS_PATH, LOAD_PATH, LINES_PATH, DRAIN_PATH)
        if path not in paths
    ]
    problems += [f"the batch route {path} is not installed" for path in missing_routes(app)]
    if problems:
        raise StartupError("co-serving is not in place: " + "; ".join(problems))
