"""Any OpenAI-compatible server as a backend: each line is one POST."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

from sglang_coserve.client.calls import Outage, server_address
from sglang_coserve.client.options import ClientOptions
from sglang_coserve.errors import ServerError, ServerGoneError, disk_errors
from sglang_coserve.http_lines.plain_server import PlainServer
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.backend import (
    ENDPOINTS,
    Backend,
    BackendLoad,
    FailureKind,
    LineRequest,
    LineResult,
    TokenRate,
)
from sglang_coserve.lines.result_record import error_message, usage_of

_MAX_VALUES: Final = 1_000_000
"""Most JSON values of a line, as ``parse_json`` has it: no online request waits here meanwhile."""

MIN_FREE_BYTES: Final = 8 << 20
"""No line is sent while less of the disk is free: its answer would be lost. The database's log
takes 4 MiB."""

_ROOM_INTERVAL_S: Final = 1.0


def lack_of_room(directory: Path) -> str | None:
    """Return that the disk of ``directory`` has no room for results; None while it has. Blocks.

    Raises:
        StorageError: the disk cannot be looked at.
    """
    with disk_errors(f"cannot use {directory}"):
        free_bytes = shutil.disk_usage(directory).free
    if free_bytes >= MIN_FREE_BYTES:
        return None
    return (
        f"the disk of {directory} is full: {free_bytes:,} bytes are free, and"
        f" {MIN_FREE_BYTES:,} are needed"
    )


class LineServer(Backend):
    """See ``Backend``. A server sends a line's tokens only in its answer.

    The server is given up when a line has failed for ``retry_for_s`` in which no line was answered,
    or when the server refuses the API key: ``raise_if_given_up`` says why, and no line ends for
    that reason.
    """

    model = ""
    endpoints = frozenset(ENDPOINTS)

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        options: ClientOptions,
        places: asyncio.Semaphore,
        directory: Path,
    ) -> None:
        """Prepare the connections; use them in an ``async with`` statement.

        ``places`` bounds the lines that are sent at the same time by all that share it. Results
        are kept in ``directory``.

        Raises:
            ConfigError: the address or the key cannot be used.
        """
        self._address, headers = server_address(base_url, api_key)
        self._server = PlainServer(self._address, headers, options.concurrency)
        self._options = options
        self._places = places
        self._directory = directory
        self._rate = TokenRate(time.monotonic)
        self._outages: dict[int, Outage] = {}
        """Of the lines that have failed since the last answer, by their numbers."""

        self._reason: str | None = None
        self._error: ServerError | None = None
        self.lack_of_room: str | None = None
        """Why lines wait for room on the disk; None while none does."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.close()

    @property
    def limits(self) -> BodyLimits:
        """See ``Backend``."""
        return BodyLimits(self._options.max_line_bytes, _MAX_VALUES, _MAX_VALUES, _MAX_VALUES)

    @property
    def stalled_by(self) -> str | None:
        """See ``Backend``."""
        return self.lack_of_room or self._reason

    async def settled(self) -> None:
        """Wait while the disk has no room for results.

        Raises:
            StorageError: the disk cannot be looked at.
        """
        try:
            while (reason := lack_of_room(self._directory)) is not None:
                self.lack_of_room = reason
                await asyncio.sleep(_ROOM_INTERVAL_S)
        finally:
            self.lack_of_room = None

    def load(self) -> BackendLoad:
        """See ``Backend``."""
        return BackendLoad(
            self._rate.per_s(),
            total_tokens=self._rate.total_tokens,
            max_in_flight=self._options.concurrency,
        )

    def raise_if_given_up(self) -> None:
        """Raise the ``ServerError`` for which the server is given up, if it is."""
        if self._error is not None:
            raise self._error

    async def run(
        self, request: LineRequest, _on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        """See ``Backend``."""
        if request.body.get("stream"):
            return LineResult.refused(400, "a batch line cannot stream: remove stream")
        async with self._places:
            began_s = time.monotonic()
            try:
                with self._rate.in_flight():
                    result = await self._server.post(
                        request,
                        timeout_s=self._options.request_timeout_s,
                        longest_pause_s=self._options.retry_policy.retry_for_s,
                    )
                    self._rate.add(usage_of(result.body).total_tokens)
            except ServerError as refused:
                error = ServerError(f"{refused}: check --api-key or COSERVE_API_KEY")
                self._give_up(error)
                return LineResult.unserved("refused", str(error), FailureKind.UNAVAILABLE)
            self._note(request.line, result, began_s, time.monotonic())
            return result

    def _note(self, line: int, result: LineResult, began_s: float, now_s: float) -> None:
        """Note whether the server was there, by what came of an attempt."""
        policy = self._options.retry_policy
        if not result.is_retryable or result.kind is FailureKind.FAILED:
            self._outages.clear()
            self._reason = None
            return
        # A server that held the line for so long was there.
        if result.kind is FailureKind.LOST and now_s - began_s >= policy.retry_for_s:
            self._outages.pop(line, None)
        if line not in self._outages:
            self._outages[line] = Outage(policy, random.Random(), server=f"{self._address}")
        self._reason = error_message(result.body)
        if result.status_code:
            self._reason = f"HTTP {result.status_code}: {self._reason}"
        try:
            self._outages[line].failed(self._reason, now_s)
        except ServerGoneError as error:
            self._give_up(error)

    def _give_up(self, error: ServerError) -> None:
        self._error = self._error or error
