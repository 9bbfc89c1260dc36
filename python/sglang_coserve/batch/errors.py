"""What callers of the Batch API cannot have, and the HTTP status of each."""

from __future__ import annotations

from http import HTTPStatus
from types import MappingProxyType

from sglang_coserve.web.errors import ApiError


class NotFoundError(ApiError):
    """There is no such object, or it belongs to another owner: the two look the same."""

    status = HTTPStatus.NOT_FOUND


class RangeError(ApiError):
    """A part of a file is asked for that begins behind its end."""

    status, code = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "invalid_range"

    def __init__(self, start: int, size_bytes: int) -> None:
        message = f"the file has {size_bytes} bytes: there is nothing from byte {start}"
        super().__init__(message, param="Range")
        self.headers = {"content-range": f"bytes */{size_bytes}"}


class ConflictError(ApiError):
    """The state of the object forbids the call."""

    status = HTTPStatus.CONFLICT


class TooLargeError(ApiError):
    """An upload is larger than allowed."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class TooManyError(ApiError):
    """There are as many unfinished batches, uploads or downloads as allowed."""

    status = HTTPStatus.TOO_MANY_REQUESTS


class QuotaError(TooManyError):
    """The files of the caller take as much of the disk as they may."""

    code = "insufficient_quota"


class SlowClientError(ApiError):
    """A body has stopped coming, or comes too slowly."""

    status, code = HTTPStatus.REQUEST_TIMEOUT, "upload_too_slow"
    # What is still to come of the body would be waited for.
    headers = MappingProxyType({"connection": "close"})


class BatchApiOffError(ApiError):
    """There is no service: the server has no data directory.

    Gateways such as LiteLLM serve batches themselves where 404 is the answer.
    """

    status, code = HTTPStatus.NOT_FOUND, "batch_api_off"


class BatchApiNotReadyError(BatchApiOffError):
    """There is no service now: it is being started, or the server drains."""

    status, code = HTTPStatus.SERVICE_UNAVAILABLE, "not_ready"
    headers = MappingProxyType({"retry-after": "1", "x-should-retry": "true"})
