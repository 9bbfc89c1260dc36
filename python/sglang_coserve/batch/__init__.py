"""A durable Batch API for one engine, as OpenAI's clients know it.

``BatchService`` is all of it but HTTP. It sees the engine through ``Backend`` and keeps
everything in one directory:

- ``service`` is what the routes call; ``schemas`` are the objects that it takes and gives.
- ``state`` is the life of a batch as a pure function; ``job_driver`` does what a state
  calls for, ``job_lines`` has the line engine (``lines``) serve the lines of a batch.
- ``store`` is SQLite, for what is known of files and batches; what is known of lines is
  in the append-only files of ``lines``.
- ``forecaster`` says when a batch will be complete.
- ``responses`` makes a batch of one line of a request that is answered in the background.
- ``stored_jobs`` is what can be done without a server.
"""

from sglang_coserve.batch.errors import (
    BatchRequestError,
    ConflictError,
    NotFoundError,
    QuotaError,
    TooLargeError,
    TooManyError,
)
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.owners import owner_of
from sglang_coserve.batch.record import BatchEvent
from sglang_coserve.batch.schemas import (
    BatchList,
    BatchObject,
    CoserveOptions,
    CreateBatch,
    ExpiresAfter,
    FileDeleted,
    FileList,
    FileObject,
)
from sglang_coserve.batch.service import BatchService, FileContent
from sglang_coserve.batch.service_status import ServiceStatus
from sglang_coserve.errors import StorageError
from sglang_coserve.lines.backend import Backend, BackendLoad, LineRequest, LineResult

__all__ = [
    "Backend",
    "BackendLoad",
    "BatchEvent",
    "BatchLimits",
    "BatchList",
    "BatchObject",
    "BatchRequestError",
    "BatchService",
    "ConflictError",
    "CoserveOptions",
    "CreateBatch",
    "ExpiresAfter",
    "FileContent",
    "FileDeleted",
    "FileList",
    "FileObject",
    "LineRequest",
    "LineResult",
    "NotFoundError",
    "QuotaError",
    "ServiceStatus",
    "StorageError",
    "TooLargeError",
    "TooManyError",
    "owner_of",
]
