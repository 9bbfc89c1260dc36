"""What callers of the Batch API cannot have. ``routes.errors`` says how each is answered."""

from __future__ import annotations

from sglang_coserve.errors import RequestError


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
