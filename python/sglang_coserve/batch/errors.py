"""Errors of the Batch API: of its callers and of the disk.

::

    CoserveError
    ├── RequestError
    │   └── BatchRequestError    one call cannot be served as asked (HTTP 400)
    │       ├── NotFoundError      no such object, or another owner's (404)
    │       ├── RangeError         a part begins behind the end of its file (416)
    │       ├── ConflictError      the object's state forbids it (409)
    │       ├── TooLargeError      an upload is over the limit (413)
    │       ├── TooManyError       too many unfinished batches, or transfers (429)
    │       └── QuotaError         its owner has too much on the disk (429)
    └── StorageError             the disk is full or failing (507)
"""

from __future__ import annotations

from sglang_coserve.errors import RequestError

__all__ = [
    "BatchRequestError",
    "ConflictError",
    "NotFoundError",
    "QuotaError",
    "RangeError",
    "TooLargeError",
    "TooManyError",
]


class BatchRequestError(RequestError):
    """One call of the Batch API cannot be served as asked."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        """The error's ``code``, as in OpenAI's error objects."""

        self.param = param
        """The parameter at fault; None if there is not exactly one."""


class NotFoundError(BatchRequestError):
    """There is no such object, or it belongs to another owner: the two look the same."""


class RangeError(BatchRequestError):
    """A part of a file is asked for that begins behind its end."""

    def __init__(self, start: int, size_bytes: int) -> None:
        message = f"the file has {size_bytes} bytes: there is nothing from byte {start}"
        super().__init__(message, code="invalid_range", param="Range")
        self.size_bytes = size_bytes


class ConflictError(BatchRequestError):
    """The state of the object forbids the call."""


class TooLargeError(BatchRequestError):
    """An upload is larger than allowed."""


class TooManyError(BatchRequestError):
    """There are as many unfinished batches, uploads or downloads as allowed."""


class QuotaError(BatchRequestError):
    """The files of the caller take as much of the disk as they may."""
