"""A server's Batch API: files go up, batches are begun and looked at, results come down."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias
from urllib.parse import quote

import httpx2

from sglang_coserve.client.calls import (
    CONNECT_TIMEOUT_S,
    Caller,
    KeyRefusedError,
    Outage,
    RefusedError,
    json_object,
    raise_if_refused,
    unusable,
)
from sglang_coserve.durable_files import append, sync_names
from sglang_coserve.errors import InputFileError, ServerError
from sglang_coserve.lines.background import to_its_end
from sglang_coserve.lines.serve_line import RetryPolicy
from sglang_coserve.terminal import printable

Batch: TypeAlias = Mapping[str, Any]
"""A batch as the server shows it: OpenAI's object, with ``coserve`` beside."""

_DEFAULTS: Final[dict[str, Any]] = {
    "completion_window": "?",
    "created_at": 0,
    "expires_at": 0,
    "request_counts": {"total": 0, "completed": 0, "failed": 0},
    "usage": {"total_tokens": 0, "input_tokens": 0, "output_tokens": 0},
    "input_file_id": "",
    "output_file_id": None,
    "error_file_id": None,
    "coserve": {},
}
"""Of a batch object, whose ``id`` and ``status`` are always there."""

_FAULT: Final[dict[str, Any]] = {"line": None, "message": ""}

FINAL_STATUSES: Final = frozenset({"completed", "failed", "expired", "cancelled"})

_RANGE_BYTES: Final = 64 << 20
"""So much of a file is asked for at once: what runs in this process answers from memory."""

_PIECE_BYTES: Final = 1 << 20
"""So much of a file is written and synced at once."""


class BatchApi(Caller):
    """Calls of one server. Methods raise ``ServerGoneError`` when it cannot be reached,
    ``RequestError`` when it says that the call is wrong, and ``ServerError`` when it refuses the
    key or has no Batch API.
    """

    is_local: ClassVar[bool] = False
    """True if batches make progress only while a client has opened them."""

    default_window: ClassVar[str] = "24h"
    """The window of a batch for which none is given."""

    output_retention_s: ClassVar[int | None] = 30 * 86_400
    """When outputs expire after the end of their batch: the longest that a server takes; None for
    never."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        policy: RetryPolicy,
        *,
        as_operator: bool = False,
        stall_s: float = 60.0,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """``as_operator``: call for batches of all keys; ``api_key`` is the admin key then.
        ``transport`` brings calls to the server; None makes connections.

        An attempt has failed when no byte of it has moved for ``stall_s``. The answer to an upload
        may take ``retry_for_s``, if that is longer.
        """
        super().__init__(base_url, api_key, policy, stall_s, transport)
        self._batches = "/coserve/batches" if as_operator else "/v1/batches"
        # A server takes what it has not read yet in its own time, and then syncs the file.
        answer_s = max(stall_s, policy.retry_for_s)
        self._upload_timeout = httpx2.Timeout(
            stall_s,
            connect=CONNECT_TIMEOUT_S,
            read=answer_s if math.isfinite(answer_s) else None,
        )

    async def is_on(self) -> bool:
        """Return whether the server has a Batch API. Only what it says itself counts as a no."""
        answer = await self._answer("GET", "/v1/batches", params={"limit": 1})
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return False
        if json_object(answer).get("object") != "list":
            raise unusable(answer, "list of batches")
        return True

    async def upload(self, source: Path) -> str:
        """Upload a file; return its id.

        Raises:
            InputFileError: it cannot be read.
        """

        async def attempt(outage: Outage) -> httpx2.Response:
            # A file is read anew by every attempt.
            try:
                file = source.open("rb")
            except OSError as error:
                raise InputFileError(f"cannot read {source}: {error.strerror}") from error
            with file:
                request = self._http.build_request(
                    "POST",
                    "/v1/files",
                    data={"purpose": "batch"},
                    files={"file": (printable(source.name), file)},
                    timeout=self._upload_timeout,
                )
                assert isinstance(request.stream, httpx2.AsyncByteStream)
                request.stream = _Noted(request.stream, self._noting(outage))
                return await self._attempt(request)

        answer = json_object(await self._retried(attempt))
        if "id" not in answer:
            raise ServerError(f"the server's answer to the upload is no file: {answer!r:.200}")
        return str(answer["id"])

    async def create(
        self, file_id: str, endpoint: str, window: str, key: str, options: Mapping[str, Any]
    ) -> Batch:
        """Begin a batch with these ``coserve`` options; the same ``key`` again returns the same
        one. Its outputs expire ``output_retention_s`` after its end."""
        body: dict[str, Any] = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": window,
            "coserve": dict(options),
        }
        if (seconds := self.output_retention_s) is not None:
            body["output_expires_after"] = {"anchor": "created_at", "seconds": seconds}
        headers = {"idempotency-key": key}
        return batch_of(await self._call("POST", "/v1/batches", json=body, headers=headers))

    async def retrieve(self, batch_id: str) -> Batch:
        """Return a batch."""
        return batch_of(await self._call("GET", f"{self._batches}/{batch_id}"))

    async def newest(self, limit: int = 20, **filters: str | None) -> list[Batch]:
        """Return the newest batches; ``filters`` are an operator's: ``owner``, ``status``."""
        given = {name: value for name, value in filters.items() if value is not None}
        page = await self._call("GET", self._batches, params={"limit": limit, **given})
        return [batch_of(each) for each in page.get("data", ())]

    async def cancel(self, batch_id: str) -> Batch:
        """Cancel a batch; finished lines keep their results."""
        return batch_of(await self._call("POST", f"{self._batches}/{batch_id}/cancel"))

    async def has_file(self, file_id: str) -> bool:
        """Return whether there is such a file."""
        try:
            await self._call("GET", f"/v1/files/{file_id}")
        except RefusedError as error:
            if error.code != "file_not_found":
                raise
            return False
        return True

    async def delete(self, file_id: str) -> None:
        """Delete a file."""
        await self._call("DELETE", f"/v1/files/{file_id}")

    async def view(self, since_s: float = 0.0) -> dict[str, Any]:
        """Return what ``/coserve/view`` says, with its history from a time on, in seconds since
        the epoch."""
        return await self._call("GET", "/coserve/view", params={"since": since_s})

    async def explanation(self, request_id: str) -> dict[str, Any]:
        """Return why a request got its tokens when it did; the key must be the admin key."""
        try:
            return await self._call("GET", f"/coserve/steps/{quote(request_id, safe='')}")
        except KeyRefusedError as error:
            raise ServerError(
                f"the server refuses the key ({error.reason}): steps need its --admin-api-key, from"
                " COSERVE_ADMIN_API_KEY or --api-key"
            ) from error

    async def fetch(self, file_id: str, path: Path) -> None:
        """Append the bytes of a file that ``path`` lacks, and force them to the disk.

        The file may still grow. What a crash can have damaged at the end of ``path`` must have
        been cut off, by ``cut_unsynced``.

        Raises:
            InputFileError: ``path`` cannot be written.
            ServerError: ``path`` has more than the file.
        """
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                begins_at = os.fstat(fd).st_size
                attempt = partial(self._fetch_part, file_id, path, fd)
                while await self._retried(attempt, os.fstat(fd).st_size):
                    pass
                if os.fstat(fd).st_size and not begins_at:
                    await asyncio.to_thread(sync_names, path.parent)
            finally:
                os.close(fd)
        except OSError as error:
            raise InputFileError(f"cannot write {path}: {error.strerror}") from error

    async def _fetch_part(self, file_id: str, path: Path, fd: int, outage: Outage) -> bool:
        """Append the next bytes of a file; return whether there are more."""
        begins_at = size_bytes = os.fstat(fd).st_size
        # A range counts bytes of the file, not of a compressed answer.
        span = f"bytes={begins_at}-{begins_at + _RANGE_BYTES - 1}"
        wanted = {"range": span, "accept-encoding": "identity"}
        async with self._http.stream(
            "GET", f"/v1/files/{file_id}/content", headers=wanted
        ) as answer:
            whole_bytes = _size_of_all(answer)
            if answer.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                _raise_if_longer(path, size_bytes, whole_bytes)
                return False
            if not answer.is_success:
                await answer.aread()
                raise_if_refused(answer)
            # Some proxies know no ranges, and send the file from its beginning.
            is_part = answer.status_code == HTTPStatus.PARTIAL_CONTENT
            skipped_bytes = 0 if is_part else size_bytes
            content = _Noted(answer.aiter_bytes(), self._noting(outage), size_bytes - skipped_bytes)
            async for piece in _pieces(content, skipped_bytes):
                await to_its_end(asyncio.to_thread(append, fd, piece, size_bytes))
                size_bytes += len(piece)
            _raise_if_longer(path, size_bytes, content.position_bytes)
        return is_part and begins_at < size_bytes < (whole_bytes or 0)

    def raise_if_given_up(self, batch: Batch) -> None:
        """Check, where this process serves ``batch``, that it still can.

        Raises:
            ServerError: the server to which lines are sent is gone, or refuses the API key.
            InputFileError: the disk has kept the batch from going on for ``retry_for_s``.
        """

    async def stop(self) -> None:
        """Serve no more lines, where this process serves them; the finished ones can be fetched."""


class _Noted(httpx2.AsyncByteStream):
    """The same chunks, each noted once it has come through: the next one is asked for then."""

    def __init__(
        self, chunks: AsyncIterable[bytes], note: Callable[[int], None], begins_at: int = 0
    ) -> None:
        self._chunks = chunks
        self._note = note
        self.position_bytes = begins_at

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        async for chunk in self._chunks:
            yield chunk
            self.position_bytes += len(chunk)
            self._note(self.position_bytes)


async def _pieces(content: AsyncIterable[bytes], skipped_bytes: int) -> AsyncGenerator[bytes]:
    """Yield ``content`` behind its first ``skipped_bytes``, in large pieces.

    Raises:
        httpx2.TransportError: the connection broke; what had come has been yielded.
    """
    piece = bytearray()
    try:
        async for chunk in content:
            piece += chunk[skipped_bytes:]
            skipped_bytes = max(0, skipped_bytes - len(chunk))
            if len(piece) >= _PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
    except httpx2.TransportError:
        if piece:
            yield bytes(piece)
        raise
    if piece:
        yield bytes(piece)


def batch_of(answer: Any) -> Batch:
    """Return the batch in an answer, with a default for what a server of another version lacks.

    Raises:
        ServerError: it is none.
    """
    if not isinstance(answer, dict) or not {"id", "status"} <= answer.keys():
        raise ServerError(f"the server's answer is no batch: {answer!r:.200}")
    filled = _DEFAULTS | answer
    for name, default in _DEFAULTS.items():
        if isinstance(default, dict):
            filled[name] = default | (answer.get(name) or {})
    errors = answer.get("errors") or {}
    faults = [_FAULT | fault for fault in errors.get("data") or ()]
    filled["errors"] = {**errors, "data": faults} if faults else None
    return filled


NO_BATCH: Final = batch_of({"id": None, "status": None})
"""Stands for a batch that does not exist yet."""


def _raise_if_longer(path: Path, size_bytes: int, whole_bytes: int | None) -> None:
    """Raise if ``path`` has more than there is: then it was made from something else."""
    if whole_bytes is not None and size_bytes > whole_bytes:
        raise ServerError(
            f"{path} has {size_bytes:,} bytes, and the server's file only {whole_bytes:,}:"
            " another server, or an older state of it; choose another output"
        )


def _size_of_all(answer: httpx2.Response) -> int | None:
    """Return the size of the whole file that ``Content-Range`` names (RFC 9110, 14.4), if any."""
    unit, _, size = answer.headers.get("content-range", "").rpartition("/")
    return int(size) if unit.startswith("bytes") and size.isdecimal() else None
