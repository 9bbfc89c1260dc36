"""Who looks at the page, and the batches that are shown to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import orjson
from fastapi import FastAPI
from starlette.responses import Response

from sglang_coserve.batch.errors import BatchApiNotReadyError, BatchApiOffError
from sglang_coserve.batch.routes.service import find_service
from sglang_coserve.batch.schemas import BatchObject
from sglang_coserve.errors import RequestError, StorageError
from sglang_coserve.web.keys import EVERYBODY, bearer_key, is_same_key, owner_of

PAGE_PATH: Final = "/coserve"
VIEW_PATH: Final = "/coserve/view"

_BATCHES: Final = 50
"""So many of the newest are shown, and as many of those that have not ended."""

_SHOWN: Final = ("id", "endpoint", "status", "created_at", "expires_at", "completed_at", "metadata")


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf the view is asked for."""

    owner: str | None
    """Whose batches are shown; None: everybody's."""

    batches_path: str | None
    """Where they can be changed; None: they are not shown."""

    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class Keys:
    """What opens the view."""

    api_key: str | None
    admin_api_key: str | None
    is_open: bool = False
    """Who brings no key sees the figures, and no batches."""

    def caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller | None:
        """Return who sends ``headers`` (of an ASGI scope); None: nobody whom the view is for."""
        try:
            key = bearer_key(headers)
        except RequestError:
            return None
        if self.admin_api_key and is_same_key(key, self.admin_api_key):
            return Caller(None, "/coserve/batches", is_operator=True)
        if not self.api_key or is_same_key(key, self.api_key):
            return Caller(EVERYBODY if self.api_key else owner_of(key), "/v1/batches")
        return Caller(None, None) if self.is_open and not key else None


def view_answer(status: int, content: dict[str, Any]) -> Response:
    """Return an answer that no cache keeps."""
    headers = {"cache-control": "no-store"}
    return Response(orjson.dumps(content), status, headers, "application/json")


async def shown_batches(app: FastAPI, caller: Caller) -> dict[str, Any]:
    """Return the caller's batches and what could be added to all; null while there is no Batch
    API, and the reason in ``error`` while there is none yet."""
    try:
        service = find_service(app)
        found: dict[str, BatchObject] = {}
        if caller.batches_path is not None:
            newest = (await service.list_batches(caller.owner, limit=_BATCHES)).data
            unfinished = service.unfinished_batches(caller.owner, _BATCHES)
            found = {each.id: each for each in (*unfinished, *newest)}
        return {
            "batches": {"path": caller.batches_path, "data": [*map(_shown, found.values())]},
            "headroom": service.headroom()._asdict(),
        }
    except StorageError as error:
        return _missing(find_service(app).context.directory.told(error))
    except BatchApiNotReadyError as error:
        return _missing(str(error))
    except BatchApiOffError:
        return {"batches": None, "headroom": None}


def _missing(reason: str) -> dict[str, Any]:
    return {"batches": {"path": None, "data": [], "error": reason}, "headroom": None}


def _shown(batch: BatchObject) -> dict[str, Any]:
    fields = batch.model_dump(mode="json", include={*_SHOWN, "request_counts", "coserve"})
    return fields | {"total_tokens": batch.usage.total_tokens}
