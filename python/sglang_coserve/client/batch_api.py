"""Calls a server's Batch API."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import nullcontext
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import httpx

from sglang_coserve.client.connections import server_address
from sglang_coserve.durable_files import append, sync_names
from sglang_coserve.errors import InputFileError, RequestError, ServerError, ServerGoneError
from sglang_coserve.lines.retry import RetryPolicy, backoff_s
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

_PASSING: Final = frozenset({429, 502, 503, 504})
_LASTING_CODES: Final = frozenset({"batch_api_off", "insufficient_quota"})
"""Codes of errors that retrying does not help, in spite of their status."""

_PIECE_BYTES: Final = 1 << 20
"""So much of a file is written and synced at once."""

_CONNECT_TIMEOUT_S: Final = 10.0
_TIMEOUT: Final = httpx.Timeout(60.0, connect=_CONNECT_TIMEOUT_S)


class BatchApi:
    """Calls one server. A call that fails for a reason that may pass, as while the server starts,
    is retried until it has failed for ``retry_for_s`` without any progress.

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
    ) -> None:
        """``as_operator``: call for batches of all keys; ``api_key`` is the admin key then."""
        address, headers = server_address(base_url, api_key)
        # There are few calls, so one httpx client is enough.
        self._http = httpx.AsyncClient(
            base_url=address, headers=headers, timeout=_TIMEOUT, trust_env=False
        )
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
        try:
            content = answer.json()
        except ValueError:
            return False
        return isinstance(content, dict) and content.get("object") == "list"

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
        """
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                begins_at = os.fstat(fd).st_size
                ends_at = await self._fetch(file_id, fd, begins_at)
            finally:
                os.close(fd)
            if ends_at and not begins_at:
                await asyncio.to_thread(sync_names, path.parent)
        except OSError as error:
            raise InputFileError(f"cannot write {path}: {error.strerror}") from error

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def _fetch(self, file_id: str, fd: int, size_bytes: int) -> int:
        """Return the size that the file then has; it had ``size_bytes``."""
        outage = _Outage(self._policy, self._rng)
        while True:
            wanted = {"range": f"bytes={size_bytes}-"}
            try:
                async with self._http.stream(
                    "GET", f"/v1/files/{file_id}/content", headers=wanted
                ) as answer:
                    if answer.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                        return size_bytes  # There is nothing more.
                    if answer.is_success:
                        # Some proxies know no ranges, and send the file from its beginning.
                        is_part = answer.status_code == HTTPStatus.PARTIAL_CONTENT
                        async for piece in _pieces(answer, 0 if is_part else size_bytes):
                            await to_its_end(asyncio.to_thread(append, fd, piece, size_bytes))
                            size_bytes += len(piece)
                            self.last_failure = None
                            outage.ends()
                        return size_bytes
                    await answer.aread()
                    _raise_if_refused(answer)
                    self.last_failure = f"HTTP {answer.status_code}: {_message(answer)}"
            except httpx.TransportError as error:
                self.last_failure = str(error) or type(error).__name__
            await outage.pause(self.last_failure)

    async def _call(self, method: str, url: str, **options: Any) -> dict[str, Any]:
        """Return the object that a call answers; ``options`` are those of ``_answer``."""
        answer = await self._answer(method, url, **options)
        _raise_if_refused(answer)
        try:
            content: dict[str, Any] = answer.json()
        except ValueError as error:
            raise ServerError(f"the answer to {method} {url} is not JSON") from error
        return content

    async def _answer(
        self,
        method: str,
        url: str,
        *,
        open_upload: Callable[[], BinaryIO] | None = None,
        **options: Any,
    ) -> httpx.Response:
        """Return the first answer that trying again would not change."""
        outage = _Outage(self._policy, self._rng)
        while True:
            try:
                # A file is read anew by every attempt.
                with open_upload() if open_upload else nullcontext() as file:
                    if file is not None:
                        options = {
                            "data": {"purpose": "batch"},
                            "files": {"file": (Path(file.name).name, file)},
                            "timeout": httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
                        }
                    answer = await self._http.request(method, url, **options)
                if not _may_pass(answer):
                    self.last_failure = None
                    return answer
                self.last_failure = f"HTTP {answer.status_code}: {_message(answer)}"
            except httpx.TransportError as error:
                self.last_failure = str(error) or type(error).__name__
            await outage.pause(self.last_failure)


class _Outage:
    """How long a call has failed, from the first failure after the last progress."""

    def __init__(self, policy: RetryPolicy, rng: random.Random) -> None:
        self._policy = policy
        self._rng = rng
        self.ends()

    def ends(self) -> None:
        """Note progress."""
        self._began_s: float | None = None
        self._failures = 0

    async def pause(self, reason: str | None) -> None:
        """Wait before the next attempt.

        Raises:
            ServerGoneError: the call has failed for as long as allowed.
        """
        policy, now_s = self._policy, time.monotonic()
        if self._began_s is None:
            self._began_s = now_s
        left_s = self._began_s + policy.retry_for_s - now_s
        if left_s <= 0:
            raise ServerGoneError(
                f"the server has answered nothing for {policy.retry_for_s:g} s"
                f" ({reason}); a batch that it has accepted goes on without us"
            )
        self._failures += 1
        pause_s = backoff_s(self._failures, policy.first_delay_s, policy.max_delay_s, self._rng)
        await asyncio.sleep(min(pause_s, left_s))


async def _pieces(answer: httpx.Response, skipped_bytes: int) -> AsyncGenerator[bytes]:
    """Yield the content behind its first ``skipped_bytes``, in large pieces.

    Raises:
        httpx.TransportError: the connection broke; what had come has been yielded.
    """
    piece = bytearray()
    try:
        async for chunk in answer.aiter_bytes():
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


def _may_pass(answer: httpx.Response) -> bool:
    """Return whether the same call may be answered otherwise later."""
    return answer.status_code in _PASSING and _code(answer) not in _LASTING_CODES


def _raise_if_refused(answer: httpx.Response) -> None:
    """Raise for an answer that retrying would not change."""
    status = answer.status_code
    if answer.is_success or _may_pass(answer):
        return
    reason = f"HTTP {status}: {_message(answer)}"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise ServerError(
            f"the server refuses the API key ({reason}): check --api-key or COSERVE_API_KEY"
        )
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise ServerError(reason)
    raise RequestError(reason)


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
