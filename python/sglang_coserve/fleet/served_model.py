"""What the engines serve, remembered while none of them is up, and ``/v1/models``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from sglang_coserve import durable_files
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.jsonl.request_line import not_served, served_name
from sglang_coserve.lines.backend import ENDPOINTS

_FILE: Final = "served_model.json"
"""In the data directory of a gateway."""

_INTERVAL_S: Final = 5.0

_log = logging.getLogger(__name__)


class ServedModel(msgspec.Struct, frozen=True):
    """What files and batches are checked against before an engine gets any of their lines."""

    names: tuple[str, ...] = ()
    """What requests may ask for, the model first and then its adapters. Unknown: none."""

    endpoints: tuple[str, ...] = ENDPOINTS
    """Unknown: all that any engine serves. An engine that has not got one says so of each line."""

    limits: BodyLimits = BodyLimits()
    """What one line may be."""

    @property
    def name(self) -> str:
        """The model's; empty while it is unknown."""
        return self.names[0] if self.names else ""

    def asked_by(self, body: Mapping[str, Any]) -> str | None:
        """Return the name that a request asks for, of the model or of an adapter.

        None if it asks for no name, or for a name that is not among ``names``.
        """
        asked = body.get("model")
        if asked in self.names:
            return str(asked)
        adapter = (served_name(asked, self.names) or "").removeprefix(f"{self.name}:")
        return adapter if adapter in self.names[1:] else None


def remembered(data: Path) -> ServedModel:
    """Return what was served when the gateway on ``data`` last had an engine. Blocks."""
    try:
        return msgspec.json.decode((data / _FILE).read_bytes(), type=ServedModel)
    except FileNotFoundError:
        return ServedModel()
    except (OSError, msgspec.DecodeError) as error:
        # It only spares clients a refusal; the first engine says it again.
        _log.warning("%s cannot be read: %s", data / _FILE, error)
        return ServedModel()


async def keep_remembered(data: Path, served: Callable[[], ServedModel]) -> None:
    """Write what is served to the disk whenever it has changed, for ever.

    Raises:
        OSError: the disk is full or failing.
    """
    written = await asyncio.to_thread(remembered, data)
    while True:
        if (latest := served()) != written:
            await asyncio.to_thread(_write, data / _FILE, msgspec.json.encode(latest))
            written = latest
        await asyncio.sleep(_INTERVAL_S)


def _write(path: Path, content: bytes) -> None:
    durable_files.replace(path, lambda file: file.write(content))


def model_routes(served: Callable[[Request], ServedModel]) -> APIRouter:
    """Return ``/v1/models``, which clients ask for first."""
    router, began_s = APIRouter(prefix="/v1/models", tags=["models"]), int(time.time())

    def card(name: str, model: ServedModel) -> dict[str, Any]:
        parent = None if name == model.name else model.name
        fields = {"object": "model", "created": began_s, "owned_by": "sglang_coserve"}
        return {"id": name, **fields, "root": name, "parent": parent}

    @router.get("")
    async def list_models(request: Request) -> dict[str, Any]:
        """List the model and its adapters; also while no engine is up, once there was one."""
        model = served(request)
        return {"object": "list", "data": [card(name, model) for name in model.names]}

    @router.get("/{name:path}")
    async def retrieve_model(request: Request, name: str) -> Response:
        """Look at one of them."""
        model = served(request)
        if name in model.names:
            return JSONResponse(card(name, model))
        return JSONResponse({"error": not_served(name, model.names)}, 404)

    return router
