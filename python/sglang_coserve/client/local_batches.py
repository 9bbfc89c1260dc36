"""Batches that the client keeps itself, in a directory, for a server without a Batch API.

``BatchService``, which a server with a Batch API runs, runs here; ``LineServer`` sends the lines.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sglang_coserve.batch.data_directory import InUseError
from sglang_coserve.batch.errors import BatchRequestError
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.schemas import CoserveOptions, CreateBatch
from sglang_coserve.batch.service import BatchService
from sglang_coserve.client.batches import Batch, Batches
from sglang_coserve.client.calls import RefusedError
from sglang_coserve.client.line_server import LineServer
from sglang_coserve.client.options import ClientOptions
from sglang_coserve.client.output_files import growing
from sglang_coserve.errors import InputFileError, StartupError, StorageError

_OWNER: Final = "client"
_CHUNK_BYTES: Final = 1 << 20
_ANY_NUMBER: Final = sys.maxsize
"""In place of limits that protect a server from its users."""


@asynccontextmanager
async def open_local_batches(
    directory: Path, server: LineServer, options: ClientOptions
) -> AsyncGenerator[LocalBatches]:
    """Continue the batches in ``directory``, which is made if need be, until the context ends.

    Raises:
        InputFileError: the directory cannot be used, or another client is using it.
    """
    limits = BatchLimits(
        max_upload_bytes=_ANY_NUMBER,
        max_stored_bytes_per_owner=_ANY_NUMBER,
        max_lines=_ANY_NUMBER,
        max_in_flight=options.concurrency,
        max_in_flight_bytes=options.max_inflight_bytes,
    )
    # ``server`` says when it is to be given up.
    policy = replace(options.retry_policy, retry_for_s=math.inf)
    async with server:
        try:
            service = await BatchService.open(
                directory, server, limits, dies_with_engine=False, retry_policy=policy
            )
        except InUseError as error:
            raise InputFileError(
                f"{directory} is in use by another client: wait for it to end, or choose another"
                " output"
            ) from error
        except StartupError as error:
            raise InputFileError(f"the batch cannot be kept in {directory}: {error}") from error
        async with service:
            yield LocalBatches(service, server)


class LocalBatches(Batches):
    """See ``Batches``."""

    is_local = True
    # As long as can be: nobody serves the batch while the client is stopped.
    default_window = "366d"

    def __init__(self, service: BatchService, server: LineServer) -> None:
        """Made by ``open_local_batches``."""
        self._service = service
        self._server = server

    @property
    def last_failure(self) -> str | None:
        """See ``Batches``."""
        return self._server.stalled_by

    async def upload(self, source: Path) -> str:
        """See ``Batches``."""
        with _errors_as_of_calls():
            return (await self._service.create_file(_OWNER, source.name, _chunks(source))).id

    async def create(
        self, file_id: str, endpoint: str, window: str, key: str, options: Mapping[str, Any]
    ) -> Batch:
        """See ``Batches``."""
        wanted = CreateBatch(
            input_file_id=file_id,
            endpoint=endpoint,
            completion_window=window,
            coserve=CoserveOptions(**options),
        )
        with _errors_as_of_calls():
            batch = await self._service.create_batch(_OWNER, wanted, key)
        return batch.model_dump(mode="json")

    async def retrieve(self, batch_id: str) -> Batch:
        """See ``Batches``."""
        with _errors_as_of_calls():
            batch = await self._service.retrieve_batch(_OWNER, batch_id)
        return batch.model_dump(mode="json")

    async def fetch(self, file_id: str, path: Path) -> None:
        """See ``Batches``."""
        with _errors_as_of_calls():
            size_bytes = (await self._service.retrieve_file(_OWNER, file_id)).bytes
            async with growing(path) as file:
                file.raise_if_longer(size_bytes)
                async for piece in self._service.files.read(file_id, file.size_bytes, size_bytes):
                    await file.append(piece)

    async def delete(self, file_id: str) -> None:
        """See ``Batches``."""
        with _errors_as_of_calls():
            await self._service.delete_file(_OWNER, file_id)

    async def wait(self, seconds: float) -> None:
        """See ``Batches``."""
        await self._server.watch(seconds)

    async def stop(self) -> None:
        """See ``Batches``."""
        await self._service.runner.close()


@contextmanager
def _errors_as_of_calls() -> Generator[None]:
    """Raise what ``Batches`` raises: a refusal has a code, and the disk is the user's."""
    try:
        yield
    except BatchRequestError as error:
        raise RefusedError(str(error), error.code) from error
    except StorageError as error:
        raise InputFileError(str(error)) from error


async def _chunks(source: Path) -> AsyncGenerator[bytes]:
    try:
        with source.open("rb") as file:
            while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise InputFileError(f"cannot read {source}: {error.strerror}") from error
