"""A server's Batch API: files go up, batches are begun and looked at, results come down."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx

from sglang_coserve.client.batches import Batch
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
from sglang_coserve.client.output_files import growing
from sglang_coserve.errors import InputFileError, ServerError
from sglang_coserve.lines.serve_line import RetryPolicy

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

_OUTPUT_S: Final = 30 * 86_400
"""The longest that the server takes."""


class BatchApi(Caller):
    """``Batches`` of one server. Methods raise ``ServerGoneError`` when it cannot be reached,
    ``RequestError`` when it says that the call is wrong, and ``ServerError`` when it refuses the
    key or has no Batch API.
    """

    is_local = False
    default_window = "24h"

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        policy: RetryPolicy,
        *,
        as_operator: bool = False,
        stall_s: float = 60.0,
    ) -> None:
        """``as_operator``: call for batches of all keys; ``api_key`` is the admin key then.

        An attempt has failed when no byte of it has moved for ``stall_s``. The answer to an upload
        may take ``retry_for_s``, if that is longer.
        """
        super().__init__(base_url, api_key, policy, stall_s)
        self._batches = "/coserve/batches" if as_operator else "/v1/batches"
        # A server takes what it has not read yet in its own time, and then syncs the file.
        answer_s = max(stall_s, policy.retry_for_s)
        self._upload_timeout = httpx.Timeout(
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

        async def attempt(outage: Outage) -> httpx.Response:
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
                    files={"file": (source.name, file)},
                    timeout=self._upload_timeout,
                )
                assert isinstance(request.stream, httpx.AsyncByteStream)
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
        one. Its outputs expire 30 days after its end."""
        body = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": window,
            "coserve": dict(options),
            "output_expires_after": {"anchor": "created_at", "seconds": _OUTPUT_S},
        }
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
        """See ``Batches``.

        Raises:
            InputFileError: ``path`` cannot be written.
            ServerError: ``path`` has more than the file.
        """
        async with growing(path) as file:

            async def attempt(outage: Outage) -> None:
                # A range counts bytes of the file, not of a compressed answer.
                wanted = {"range": f"bytes={file.size_bytes}-", "accept-encoding": "identity"}
                url = f"/v1/files/{file_id}/content"
                async with self._http.stream("GET", url, headers=wanted) as answer:
                    if answer.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                        file.raise_if_longer(_size_of_all(answer))
                        return  # There is nothing more.
                    if not answer.is_success:
                        await answer.aread()
                        raise_if_refused(answer)
                    # Some proxies know no ranges, and send the file from its beginning.
                    is_part = answer.status_code == HTTPStatus.PARTIAL_CONTENT
                    skipped_bytes = 0 if is_part else file.size_bytes
                    begins_at = file.size_bytes - skipped_bytes
                    content = _Noted(answer.aiter_bytes(), self._noting(outage), begins_at)
                    async for chunk in content:
                        await file.append(chunk[skipped_bytes:])
                        skipped_bytes = max(0, skipped_bytes - len(chunk))
                    file.raise_if_longer(content.position_bytes)

            await self._retried(attempt, file.size_bytes)

    async def wait(self, seconds: float) -> None:
        """See ``Batches``."""
        await asyncio.sleep(seconds)

    async def stop(self) -> None:
        """See ``Batches``: the server goes on."""


class _Noted(httpx.AsyncByteStream):
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


def _size_of_all(answer: httpx.Response) -> int | None:
    """Return the size of a file that a 416 (RFC 9110, 15.5.17) names; None without one."""
    unit, _, size = answer.headers.get("content-range", "").partition("*/")
    return int(size) if unit.strip() == "bytes" and size.isdecimal() else None
