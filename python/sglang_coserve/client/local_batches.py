"""The Batch API in this process, for a server that has none.

The routes of a server with a Batch API are called here without a connection. Their service keeps
the batch in a directory, and sends its lines to the server (``LineServer``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import httpx
from fastapi import FastAPI

from sglang_coserve.batch.api import add_batch_routes
from sglang_coserve.batch.data_directory import InUseError
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.routes.caller import set_service
from sglang_coserve.batch.service import BatchService
from sglang_coserve.client.batch_api import BatchApi
from sglang_coserve.client.line_server import LineServer
from sglang_coserve.client.options import ClientOptions
from sglang_coserve.errors import InputFileError, StartupError

_ANY_NUMBER: Final = sys.maxsize
"""In place of limits that protect a server from its users."""


class LocalBatchApi(BatchApi):
    """See ``BatchApi``."""

    is_local = True
    # As long as can be: nobody serves the batch while the client is stopped.
    default_window = "366d"

    def __init__(self, service: BatchService, server: LineServer, options: ClientOptions) -> None:
        app = FastAPI()
        add_batch_routes(app)
        set_service(app, service)
        transport = httpx.ASGITransport(app)
        super().__init__("http://local", None, options.retry_policy, transport=transport)
        self._service = service
        self._server = server

    async def wait(self, seconds: float) -> None:
        """See ``BatchApi``.

        Raises:
            ServerError: the server is given up.
        """
        await self._server.watch(seconds)

    async def stop(self) -> None:
        """See ``BatchApi``."""
        await self._service.runner.close()


@asynccontextmanager
async def open_local_batches(
    directory: Path, server: LineServer, options: ClientOptions
) -> AsyncGenerator[BatchApi]:
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
                directory,
                server,
                limits,
                dies_with_engine=False,
                retry_policy=policy,
                hint="choose another output",
                must_be_private=False,
            )
        except InUseError as error:
            raise InputFileError(
                f"{directory} is in use by another client: wait for it to end, or choose another"
                " output"
            ) from error
        except StartupError as error:
            raise InputFileError(f"the batch cannot be kept in {directory}: {error}") from error
        async with service, LocalBatchApi(service, server, options) as api:
            yield api
