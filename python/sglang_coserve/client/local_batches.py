"""The Batch API in this process, for a server that has none.

The routes of a server with a Batch API are called here without a connection. Their service keeps
the batch in a directory, and sends its lines to the server (``LineServer``).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Final

import httpx2
from fastapi import FastAPI

from sglang_coserve.batch.api import add_batch_routes
from sglang_coserve.batch.data_directory import InUseError
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.routes.service import set_service
from sglang_coserve.batch.service import BatchService
from sglang_coserve.client.batch_api import Batch, BatchApi
from sglang_coserve.client.calls import error_message
from sglang_coserve.client.line_server import MIN_FREE_BYTES, LineServer, lack_of_room
from sglang_coserve.client.options import ClientOptions
from sglang_coserve.errors import InputFileError, StartupError

_ANY_NUMBER: Final = sys.maxsize
"""In place of limits that protect a server from its users, and of times after which it forgets."""

_RESERVED_BYTES: Final = 1 << 20
"""Left free by results. Lines are sent while ``MIN_FREE_BYTES`` are free, so that the answers to
lines in flight have room."""

_STANDING: Final = frozenset({"disk", "error"})
"""Values of ``waiting_for`` that do not pass by themselves."""


class _Routes(httpx2.ASGITransport):
    """Calls the routes. Raises ``InputFileError`` where they say that the disk is full or failing:
    that disk is not a server's."""

    def __init__(self, app: FastAPI, directory: Path) -> None:
        super().__init__(app)
        self._directory = directory

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """See ``ASGITransport``."""
        answer = await super().handle_async_request(request)
        if answer.status_code == HTTPStatus.INSUFFICIENT_STORAGE:
            await answer.aread()
            reason = lack_of_room(self._directory) or error_message(answer)
            raise InputFileError(
                f"the batch cannot be kept in {self._directory}: {reason}; free some of that disk,"
                " or choose another output"
            )
        return answer


class LocalBatchApi(BatchApi):
    """See ``BatchApi``."""

    is_local = True
    # As long as can be: nobody serves the batch while the client is stopped.
    default_window = "366d"
    output_retention_s = None

    def __init__(
        self, directory: Path, service: BatchService, server: LineServer, options: ClientOptions
    ) -> None:
        app = FastAPI()
        add_batch_routes(app)
        set_service(app, service)
        transport = _Routes(app, directory)
        super().__init__("http://local", None, options.retry_policy, transport=transport)
        self._directory = directory
        self._service = service
        self._server = server
        self._stands_since_s: float | None = None

    def raise_if_given_up(self, batch: Batch) -> None:
        """See ``BatchApi``."""
        self._server.raise_if_given_up()
        extra, reason = batch["coserve"], self._server.lack_of_room
        if extra.get("waiting_for") in _STANDING:
            reason = reason or extra.get("warning")
        now_s = time.monotonic()
        if reason is None:
            self._stands_since_s = None
        elif self._stands_since_s is None:
            self._stands_since_s = now_s
        elif now_s - self._stands_since_s >= self._policy.retry_for_s:
            raise InputFileError(
                f"the batch in {self._directory} has stood still for"
                f" {self._policy.retry_for_s:g} s: {reason}. Mend that and run the same command"
                " again, or begin anew with another output"
            )

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
        batch_retention_s=_ANY_NUMBER,
        input_retention_s=_ANY_NUMBER,
        min_free_bytes=MIN_FREE_BYTES,
        reserved_bytes=_RESERVED_BYTES,
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
        async with service, LocalBatchApi(directory, service, server, options) as api:
            yield api
