"""Calls a server's Batch API."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from contextlib import nullcontext
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias, TypeVar

import httpx

from sglang_coserve.client.connections import server_address
from sglang_coserve.client.outage import Outage
from sglang_coserve.durable_files import append, sync_names
from sglang_coserve.errors import InputFileError, RequestError, ServerError
from sglang_coserve.lines.retry import RetryPolicy
from sglang_coserve.lines.worker_threads import to_its_end

__all__ = ["FINAL_STATUSES", "Batch", "BatchApi", "batch_of"]

Batch: TypeAlias = Mapping[str, Any]
"""A batch as the server shows it: OpenAI's object, with ``coserve`` beside."""

_DEFAULTS: Final[dict[str, Any]] = {
    "completion_window": "?",
    "created_at": 0,
    "expires_at": 0,
    "request_counts": {"total": 0, "completed": 0, "failed": 0},
    "usage": {"total_tokens": 0, "input_tokens": 0, "output_tokens": 0},
    "output_file_id": None,
    "error_file_id": None,
    "coserve": {},
}
"""Of a batch object, whose ``id`` and ``status`` are always there."""

_FAULT: Final[dict[str, Any]] = {"line": None, "message": ""}

FINAL_STATUSES: Final = frozenset({"completed", "failed", "expired", "cancelled"})

_PASSING: Final = frozenset({408, 429, 502, 503, 504})
_LASTING_CODES: Final = frozenset({"batch_api_off", "insufficient_quota"})
"""Codes of errors that retrying does not help, in spite of their status."""

_PIECE_BYTES: Final = 1 << 20
"""So much of a file is written and synced at once."""

_CONNECT_TIMEOUT_S: Final = 10.0

_UNSENT_BYTES: Final = 1 << 17
"""Two chunks of an upload: one on its way, and the next one."""

_T = TypeVar("_T")


class BatchApi:
    """Calls one server. A call that fails for a reason that may pass, as while the server starts,
    is retried until it has got nowhere for ``retry_for_s``: see ``Outage``.

    Methods raise ``ServerGoneError`` when the server cannot be reached, ``RequestError``
    when it says that the call is wrong, and ``ServerError`` when it refuses the key or
    has no Batch API.
    """

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
        address, headers = server_address(base_url, api_key)
        # There are few calls, so one httpx client is enough.
        self._http = httpx.AsyncClient(
            base_url=address,
            headers=headers,
            timeout=_timeout(stall_s, stall_s),
            trust_env=False,
            transport=httpx.AsyncHTTPTransport(trust_env=False, socket_options=_little_unsent()),
        )
        self._stall_s = stall_s
        self._batches = "/coserve/batches" if as_operator else "/v1/batches"
        self._policy = policy
        self._rng = random.Random()
        self.last_failure: str | None = None
        """Why a call is being retried; None while the server answers."""

    async def is_on(self) -> bool:
        """Return whether the server has a Batch API. Only what it says itself counts as a no."""
        answer = await self._answer("GET", "/v1/batches", params={"limit": 1})
        if answer.status_code == HTTPStatus.NOT_FOUND or _code(answer) == "batch_api_off":
            return False
        _raise_if_refused(answer)
        if _object(answer).get("object") != "list":
            raise _unusable(answer, "list of batches")
        return True

    async def upload(self, source: Path) -> str:
        """Upload a file; return its id.

        Raises:
            InputFileError: it cannot be read.
        """

        def open_source() -> BinaryIO:
            try:
                return source.open("rb")
            except OSError as error:
                raise InputFileError(f"cannot read {source}: {error.strerror}") from error

        answer = await self._call("POST", "/v1/files", open_upload=open_source)
        if "id" not in answer:
            raise ServerError(f"the server's answer to the upload is no file: {answer!r:.200}")
        return str(answer["id"])

    async def create(
        self, file_id: str, endpoint: str, window: str, key: str, options: Mapping[str, Any]
    ) -> Batch:
        """Begin a batch with these ``coserve`` options; the same ``key`` again returns the same
        one."""
        body = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": window,
            "coserve": dict(options),
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

    async def fetch(self, file_id: str, path: Path) -> None:
        """Append the bytes of a file that ``path`` lacks, and force them to the disk.

        The file may still grow. What a crash can leave at the end of ``path`` must have been cut
        off.

        Raises:
            InputFileError: ``path`` cannot be written.
            ServerError: ``path`` has more than the file.
        """
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                begins_at = os.fstat(fd).st_size
                ends_at = await self._fetch(file_id, path, fd, begins_at)
            finally:
                os.close(fd)
            if ends_at and not begins_at:
                await asyncio.to_thread(sync_names, path.parent)
        except OSError as error:
            raise InputFileError(f"cannot write {path}: {error.strerror}") from error

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def _fetch(self, file_id: str, path: Path, fd: int, size_bytes: int) -> int:
        """Return the size that the file then has; it had ``size_bytes``."""

        async def attempt(outage: Outage) -> None:
            nonlocal size_bytes
            # A range counts bytes of the file, not of a compressed answer.
            wanted = {"range": f"bytes={size_bytes}-", "accept-encoding": "identity"}
            url = f"/v1/files/{file_id}/content"
            async with self._http.stream("GET", url, headers=wanted) as answer:
                if answer.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    _raise_if_longer(path, size_bytes, _size_of_all(answer))
                    return  # There is nothing more.
                if not answer.is_success:
                    await answer.aread()
                    _raise_if_refused(answer)
                # Some proxies know no ranges, and send the file from its beginning.
                is_part = answer.status_code == HTTPStatus.PARTIAL_CONTENT
                begins_at = size_bytes if is_part else 0
                content = _Noted(answer.aiter_bytes(), self._noting(outage), begins_at)
                async for piece in _pieces(content, size_bytes - begins_at):
                    await to_its_end(asyncio.to_thread(append, fd, piece, size_bytes))
                    size_bytes += len(piece)
                _raise_if_longer(path, size_bytes, content.position_bytes)

        await self._retried(attempt, size_bytes)
        return size_bytes

    async def _call(self, method: str, url: str, **options: Any) -> dict[str, Any]:
        """Return the object that a call answers; ``options`` are those of ``_answer``."""
        answer = await self._answer(method, url, **options)
        _raise_if_refused(answer)
        return _object(answer)

    async def _answer(
        self,
        method: str,
        url: str,
        *,
        open_upload: Callable[[], BinaryIO] | None = None,
        **options: Any,
    ) -> httpx.Response:
        """Return the first answer that trying again would not change."""

        async def attempt(outage: Outage) -> httpx.Response:
            # A file is read anew by every attempt.
            with open_upload() if open_upload else nullcontext() as file:
                if file is None:
                    request = self._http.build_request(method, url, **options)
                else:
                    request = self._upload(method, url, file, outage)
                answer = await self._http.send(request)
            _raise_if_passing(answer)
            self.last_failure = None
            return answer

        return await self._retried(attempt)

    def _upload(self, method: str, url: str, file: BinaryIO, outage: Outage) -> httpx.Request:
        # A server takes what it has not read yet in its own time, and then syncs the file.
        answer_s = max(self._stall_s, self._policy.retry_for_s)
        request = self._http.build_request(
            method,
            url,
            data={"purpose": "batch"},
            files={"file": (Path(file.name).name, file)},
            timeout=_timeout(self._stall_s, answer_s if math.isfinite(answer_s) else None),
        )
        assert isinstance(request.stream, httpx.AsyncByteStream)
        request.stream = _Noted(request.stream, self._noting(outage))
        return request

    async def _retried(
        self, attempt: Callable[[Outage], Awaitable[_T]], furthest_bytes: int = 0
    ) -> _T:
        """Return what ``attempt`` does, which is tried again until it has got nowhere for too long.

        Raises:
            ServerGoneError: it has.
        """
        server = f"{self._http.base_url}"
        outage = Outage(self._policy, self._rng, furthest_bytes, server=server)
        while True:
            try:
                return await attempt(outage)
            except _PassingError as error:
                reason = str(error)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            self.last_failure = reason
            await asyncio.sleep(outage.failed(reason, time.monotonic()))

    def _noting(self, outage: Outage) -> Callable[[int], None]:
        def note(position_bytes: int) -> None:
            outage.reached(position_bytes, time.monotonic())
            self.last_failure = None

        return note


def _timeout(stall_s: float, answer_s: float | None) -> httpx.Timeout:
    return httpx.Timeout(stall_s, connect=_CONNECT_TIMEOUT_S, read=answer_s)


def _little_unsent() -> list[tuple[int, int, int]]:
    """Let little wait to be sent. The system would keep megabytes, and take the next chunk only
    when a third of them has gone: on a slow link an upload would seem to stand still."""
    if not hasattr(socket, "TCP_NOTSENT_LOWAT"):
        return []
    return [(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)]


class _PassingError(Exception):
    """The same call may be answered otherwise later."""


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


async def _pieces(content: AsyncIterable[bytes], skipped_bytes: int) -> AsyncGenerator[bytes]:
    """Yield ``content`` behind its first ``skipped_bytes``, in large pieces.

    Raises:
        httpx.TransportError: the connection broke; what had come has been yielded.
    """
    piece = bytearray()
    try:
        async for chunk in content:
            piece += chunk[skipped_bytes:]
            skipped_bytes = max(0, skipped_bytes - len(chunk))
            if len(piece) >= _PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
    except httpx.TransportError:
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


def _raise_if_longer(path: Path, size_bytes: int, whole_bytes: int | None) -> None:
    """Raise if ``path`` has more than there is: then it was made from something else."""
    if whole_bytes is not None and size_bytes > whole_bytes:
        raise ServerError(
            f"{path} has {size_bytes:,} bytes, and the server's file only {whole_bytes:,}:"
            " another server, or an older state of it; choose another output"
        )


def _size_of_all(answer: httpx.Response) -> int | None:
    """Return the size of a file that a 416 (RFC 9110, 15.5.17) names; None without one."""
    unit, _, size = answer.headers.get("content-range", "").partition("*/")
    return int(size) if unit.strip() == "bytes" and size.isdecimal() else None


def _raise_if_passing(answer: httpx.Response) -> None:
    """Raise ``_PassingError`` for an answer that retrying may change."""
    if answer.status_code in _PASSING and _code(answer) not in _LASTING_CODES:
        raise _PassingError(f"HTTP {answer.status_code}: {_message(answer)}")


def _raise_if_refused(answer: httpx.Response) -> None:
    """Raise for an answer that is no success; ``_PassingError`` if retrying may change it."""
    status = answer.status_code
    if answer.is_success:
        return
    _raise_if_passing(answer)
    reason = f"HTTP {status}: {_message(answer)}"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise ServerError(
            f"the server refuses the API key ({reason}): check --api-key or COSERVE_API_KEY"
        )
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise ServerError(reason)
    raise RequestError(reason)


def _object(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object in an answer.

    Raises:
        ServerError: it is none, as that of a proxy's page.
    """
    try:
        content = answer.json()
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise _unusable(answer, "JSON object")
    return content


def _unusable(answer: httpx.Response, wanted: str) -> ServerError:
    return ServerError(
        f"{answer.url} has answered with {answer.text[:80]!r}, which is no {wanted}: is that the"
        " address of the server? One without a Batch API is used with --no-batch"
    )


def _error(answer: httpx.Response) -> Mapping[str, Any]:
    try:
        error = json.loads(answer.content)["error"]
    except (ValueError, LookupError, TypeError):
        return {}
    return error if isinstance(error, dict) else {"message": error}


def _code(answer: httpx.Response) -> str | None:
    return _error(answer).get("code")


def _message(answer: httpx.Response) -> str:
    return str(_error(answer).get("message") or answer.text[:500])
