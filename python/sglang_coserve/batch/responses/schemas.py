"""Bodies of calls that begin or delete background responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from sglang_coserve.batch.schemas import MetadataKey, MetadataValue


class CreateResponse(BaseModel):
    """The body of a request in the background; the engine looks at the other fields."""

    model_config = ConfigDict(extra="allow")

    background: Literal[True]
    stream: bool | None = None
    store: Literal[True] | None = None
    """It is stored, whatever else is asked."""

    model: Annotated[str, Field(max_length=256)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    previous_response_id: str | None = None

    coserve_deadline_s: Annotated[float, Field(ge=1, le=30 * 86_400)] | None = None
    """When it is given up, counted from its creation; by default after a day."""


class ResponseDeleted(BaseModel):
    """The answer to the deletion of a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
