"""``/coserve``, the operator's page, and ``/coserve/view``, what it shows, of a fleet.

What is said is what a gateway can know: how the engines and the batches stand. What only an engine
knows, its steps, its memory and its decisions, that one's own page shows.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from sglang_coserve.batch.routes import (
    PAGE_PATH,
    VIEW_PATH,
    Keys,
    shown_batches,
    view_answer,
)
from sglang_coserve.fleet.backend import FleetBackend
from sglang_coserve.fleet.engine_views import EngineViews
from sglang_coserve.fleet.report import fleet_status
from sglang_coserve.view import LEVELS, Page, fleet_standing

__all__ = ["view_routes"]

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
    known = {
        url: users
        for url, users in (await views.online_users(fleet.engines)).items()
        if users.level in LEVELS  # A newer engine may know others.
    }
    users_of = {url: msgspec.to_builtins(users) for url, users in known.items()}
    status = fleet_status(fleet)
    loads = [engine.load for engine in fleet.engines if engine.load is not None]
    return {
        "at": time.time(),
        "model": loads[0].model_name if loads else None,
        "online_users": fleet_standing(users_of),
        "fleet": status | {"offline_tokens_per_s": fleet.load().offline_tokens_per_s},
        "engines": [
            each | {"online_users": users_of.get(each["url"])} for each in status.pop("engines")
        ],
    }
