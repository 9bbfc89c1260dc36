"""Writes docs/routes.md, the page of all routes, from the applications and the table of SGLang's.

python scripts/reference/routes_page.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Final

from fastapi import FastAPI
from starlette.routing import BaseRoute, Route

from sglang_coserve.batch.api import add_batch_routes
from sglang_coserve.fleet.gateway import gateway_app
from sglang_coserve.fleet.options import GatewayOptions
from sglang_coserve.guard.route_table import DECISIONS, Decision
from sglang_coserve.srt.routes.drain import Health
from sglang_coserve.srt.routes.engine_routes import add_load_route
from sglang_coserve.srt.routes.step_routes import add_step_routes

PAGE: Final = Path(__file__).parents[2] / "docs" / "routes.md"

_TOP: Final = """\
# All routes

Routes of a server and of a gateway, for those who write clients. Batches have [a
page](batch_api.md), `/coserve/drain` [another](fleet.md#taking-an-engine-out). `/coserve` is [the
page to watch](watch.md) of both; `/coserve/view` and `/coserve/status` are its data. [A
script](../scripts/reference/routes_page.py) makes this page.
"""


def page() -> str:
    """Return the text of the page."""
    batches, server = FastAPI(openapi_url=None), FastAPI(openapi_url=None)
    add_batch_routes(batches)
    add_load_route(SimpleNamespace(app=server), Health())
    add_step_routes(SimpleNamespace(app=server))
    known = {path for path, *_ in _rows(batches.routes)}
    gateway = [row for row in _rows(_gateway().routes) if row[0] not in known]
    sections = (
        ("Batches, files and responses, of a server and a gateway", _rows(batches.routes)),
        ("Of a server", _rows(server.routes)),
        ("Of a gateway", gateway),
    )
    parts = [_TOP]
    for title, rows in sections:
        table = "".join(f"| `{methods} {path}` | {text} |\n" for path, methods, text in rows)
        parts.append(f"## {title}\n\n| route | |\n|---|---|\n{table}")
    return "\n".join([*parts, _SGLANGS + "".join(map(_row_of, DECISIONS))])


_SGLANGS: Final = """\
## SGLang's, on a server

A server answers 404 at any route of SGLang's that is not in this table. Who may call one depends on
[the keys](security.md#keys).

| routes | who may call them | what they compute | bound |
|---|---|---|---|
"""


def _row_of(decision: Decision) -> str:
    paths = ", ".join(f"`{path}`" for path in decision.paths)
    return f"| {paths} | {decision.caller.value} | {decision.work} | {decision.bound} |\n"


def _gateway() -> FastAPI:
    options = GatewayOptions("data", engine=["http://a:1"], engine_admin_key="key")
    return gateway_app(options, print)


def _rows(routes: Sequence[BaseRoute]) -> Iterator[tuple[str, str, str]]:
    """Yield path, methods and what it does, of routes that the schema has."""
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            text = (route.endpoint.__doc__ or "").split("\n\n")[0]
            methods = ", ".join(sorted((route.methods or set()) - {"HEAD"}))
            yield route.path, methods, " ".join(text.split()).replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page())
