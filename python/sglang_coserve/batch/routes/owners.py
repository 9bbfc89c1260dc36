"""``/coserve/owners``: the operator gives the files and batches of one key to another."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field

from sglang_coserve.batch.routes.service import Service
from sglang_coserve.web.keys import operator_router

operators = operator_router("/coserve/owners")

_OWNER = r"^(everybody|[0-9a-f]{64})$"


class MoveOwner(BaseModel):
    """The body of a request to move what an owner has."""

    model_config = ConfigDict(extra="forbid")

    to: Annotated[str, Field(pattern=_OWNER)]
    """The owner that gets it all: ``everybody``, or the SHA-256 of a key in hexadecimal digits."""


class OwnerMoved(BaseModel):
    """The answer to a move: numbers of rows."""

    object: Literal["coserve.owner.move"] = "coserve.owner.move"
    files: int
    batches: int
    """Batches and background responses."""


@operators.post("/{owner}/move")
async def move_owner(
    service: Service, owner: Annotated[str, Path(pattern=_OWNER)], body: MoveOwner
) -> OwnerMoved:
    """Give all files, batches and responses of an owner to another one, after a key has changed."""
    files, batches = await service.move_owner(owner, body.to)
    return OwnerMoved(files=files, batches=batches)
