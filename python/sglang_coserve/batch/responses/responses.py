"""Background responses: single requests that survive everything that a batch survives.

Each is a batch of one line. No list of batches has it, and no list of files its files; it is
deleted some days after its end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from http import HTTPStatus
from typing import Any, Final

import orjson

from sglang_coserve.batch.admission import window_text
from sglang_coserve.batch.context import JobContext, new_id
from sglang_coserve.batch.errors import ConflictError, NotFoundError
from sglang_coserve.batch.file_store import FileStore, once
from sglang_coserve.batch.job_supervisor import JobSupervisor
from sglang_coserve.batch.record import JobRecord, Status
from sglang_coserve.batch.responses.schemas import CreateResponse
from sglang_coserve.batch.state import Asked
from sglang_coserve.batch.store import batch_rows
from sglang_coserve.errors import StorageError
from sglang_coserve.jsonl.body_limits import mended_json
from sglang_coserve.jsonl.request_line import BadLineError, parse_request_line
from sglang_coserve.lines.background import to_its_end
from sglang_coserve.lines.result_record import encode_json
from sglang_coserve.web.errors import ApiError

_REPEATED: Final = (
    *("model", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls"),
    *("reasoning", "temperature", "tool_choice", "top_logprobs", "top_p", "truncation", "user"),
)
"""Fields of a request that its object has from the start, if they are not large."""

_MOST_REPEATED_BYTES: Final = 4096
"""Longest field that is repeated, in JSON. Metadata has a bound of its own."""

_DEFAULTS: Final[Mapping[str, Any]] = {
    "model": "default",
    "instructions": None,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "temperature": None,
    "top_p": None,
    "usage": None,
}
_ACTIVE: Final = ("queued", "in_progress")

RESPONSES: Final = "/v1/responses"

ID_PREFIX: Final = "resp_"
"""The rest of an id is that of the batch, 24 hexadecimal digits."""


def batch_id_of(response_id: str) -> str:
    """Return the id of the batch that a response is."""
    return f"batch_{response_id[-24:]}"


def response_object(
    batch: JobRecord, record: Mapping[str, Any] | None, *, is_in_engine: bool
) -> dict[str, Any]:
    """Return the object of the response that ``batch`` is.

    ``record`` is that of its line, once the batch is complete; see ``encode_record``.
    """
    assert batch.response is not None
    answer, error = _outcome(batch, record)
    status = "failed" if error else _status(batch, is_in_engine=is_in_engine)
    return {
        **_DEFAULTS,
        **batch.response,
        "status": status,
        "incomplete_details": None,
        "output": [],
        **answer,
        "id": ID_PREFIX + batch.id.removeprefix("batch_"),
        "object": "response",
        "created_at": int(batch.created_at_s),
        "completed_at": None if batch.completed_at_s is None else int(batch.completed_at_s),
        "background": True,
        "error": error or answer.get("error"),
        "metadata": batch.response.get("metadata", {}),
        "service_tier": "flex",
        "store": True,
    }


def has_ended(response: Mapping[str, Any]) -> bool:
    """Return whether a response will not change any more."""
    return response["status"] not in _ACTIVE


def _status(batch: JobRecord, *, is_in_engine: bool) -> str:
    match batch.status:
        case Status.COMPLETED:
            return "completed"
        case Status.CANCELLING | Status.CANCELLED:
            return "cancelled"
    is_answered = batch.progress.lines > 0
    return "in_progress" if is_in_engine or is_answered else "queued"


def _outcome(
    batch: JobRecord, record: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the engine's answer, empty while there is none, and what went wrong."""
    if batch.status is Status.FAILED:
        return {}, _error("; ".join(fault.message for fault in batch.faults))
    if batch.is_past_deadline:
        return {}, _error(f"not finished within {batch.completion_window}")
    if record is None:
        return {}, None
    if record["error"] is not None:
        return {}, _error(record["error"]["message"])
    answered = record["response"]
    if answered["status_code"] >= 300:
        is_request = answered["status_code"] < HTTPStatus.INTERNAL_SERVER_ERROR
        return {}, _error(answered["body"]["error"]["message"], is_request=is_request)
    return dict(answered["body"]), None


def _error(message: str, *, is_request: bool = False) -> dict[str, str]:
    # Of the codes that OpenAI's object may have, the closest ones.
    return {"code": "invalid_prompt" if is_request else "server_error", "message": message}


def no_stream() -> ApiError:
    """Return the error of who asks for the events of a background response."""
    return ApiError(
        f"a background response has no stream: leave stream out, and ask GET {RESPONSES}/ID for its"
        " status and its answer",
        code="unsupported_parameter",
        param="stream",
    )


_WINDOW_S: Final = 86_400.0
_NOT_OF_THE_LINE: Final = {
    *("background", "stream", "stream_options", "store", "service_tier", "coserve_deadline_s")
}
_LEAVE_S: Final = 10.0
"""How long a response may need to leave the engine once it is cancelled: a step, usually."""


class BackgroundResponses:
    """Creates, shows, cancels and deletes responses.

    Methods raise ``NotFoundError`` for what an owner does not have, other ``ApiError``
    for what cannot be asked, and ``StorageError`` when the disk fails.
    """

    def __init__(self, context: JobContext, files: FileStore, runner: JobSupervisor) -> None:
        self._context = context
        self._files = files
        self._runner = runner

    async def create(
        self, owner: str, request: CreateResponse, idempotency_key: str | None = None
    ) -> dict[str, Any]:
        """Begin a response. The same key and request again return the same response.

        Raises:
            ApiError: it cannot be served in the background.
            ConflictError: the key was used for another request.
            TooManyError: too many responses have not ended.
            QuotaError: the owner has too much on the disk.
        """
        if RESPONSES not in self._context.backend.endpoints:
            raise ApiError(f"this model does not serve {RESPONSES}", code="invalid_endpoint")
        if request.stream:
            raise no_stream()
        if request.previous_response_id is not None:
            raise ApiError(
                "a background response continues no other: send the whole conversation as input",
                code="unsupported_parameter",
                param="previous_response_id",
            )
        line = await self._context.threads.run(self._line, request)
        wanted = self._wanted(owner, request, idempotency_key, line)
        return await to_its_end(self._create(wanted, line))

    async def retrieve(self, owner: str, response_id: str) -> dict[str, Any]:
        """Return one response."""
        return await self._shown(await self._find(owner, response_id))

    async def cancel(self, owner: str, response_id: str) -> dict[str, Any]:
        """Cancel a response; one that is answered or has ended stays as it is."""
        await self._find(owner, response_id)
        try:
            batch = await self._runner.change(batch_id_of(response_id), Asked("cancel"), owner)
        except ConflictError:
            return await self.retrieve(owner, response_id)
        return await self._shown(batch)

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response.

        Raises:
            ConflictError: it has not ended.
        """
        batch = await self._find(owner, response_id)
        driver = self._runner.driver(batch.id)
        # One whose window has closed is shown as failed while it is being finalized.
        if batch.status in (Status.CANCELLING, Status.FINALIZING) and driver is not None:
            await asyncio.wait({driver.task}, timeout=_LEAVE_S)
        now_s = self._context.clock.now_s()
        await self._context.store.run(batch_rows.delete_response, batch.id, owner, now_s)
        for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            with suppress(NotFoundError):  # There was none, or it has expired.
                await self._files.remove(owner, file_id)

    async def _find(self, owner: str, response_id: str) -> JobRecord:
        return await self._context.store.run(
            batch_rows.find_response, batch_id_of(response_id), owner
        )

    def _line(self, request: CreateResponse) -> bytes:
        """Return the only line of the batch. It was checked, as nothing checks it later."""
        body = request.model_dump(exclude_unset=True, exclude=_NOT_OF_THE_LINE)
        line = {"custom_id": "response", "method": "POST", "url": RESPONSES, "body": body}
        try:
            content = orjson.dumps(line)
        except TypeError:  # Lone surrogates, say, which are served as in the line of a file.
            content = mended_json(json.dumps(line).encode())
        try:
            parse_request_line(content, RESPONSES)
        except BadLineError as error:
            raise ApiError(f"the body cannot be kept: {error}", code="invalid_value") from None
        return content + b"\n"

    def _wanted(
        self,
        owner: str,
        request: CreateResponse,
        idempotency_key: str | None,
        line: bytes,
    ) -> JobRecord:
        now_s, rng = self._context.clock.now_s(), self._context.rng
        within_s = request.coserve_deadline_s or _WINDOW_S
        body = request.model_dump(include=set(_REPEATED), exclude_none=True, exclude_unset=True)
        return JobRecord(
            id=new_id("batch_", rng),
            owner=owner,
            endpoint=RESPONSES,
            input_file_id=new_id("file-", rng),
            output_file_id=new_id("file-", rng),
            error_file_id=new_id("file-", rng),
            completion_window=window_text(within_s),
            idempotency_key=idempotency_key,
            fingerprint=sha256(line).hexdigest(),
            status=Status.IN_PROGRESS,
            created_at_s=now_s,
            expires_at_s=now_s + within_s,
            in_progress_at_s=now_s,
            total_lines=1,
            response={
                name: value
                for name, value in body.items()
                if name == "metadata" or len(encode_json(value)) <= _MOST_REPEATED_BYTES
            },
        )

    async def _create(self, wanted: JobRecord, line: bytes) -> dict[str, Any]:
        # Before its line is stored: who has no room for another is answered, too.
        earlier = await self._context.store.run(batch_rows.find_repeated, wanted)
        if earlier is not None:
            return await self._shown(earlier)
        await self._files.add(
            wanted.owner,
            wanted.input_file_id,
            "response",
            f"{wanted.id}.jsonl",
            once(line),
            lambda _: wanted.expires_at_s,  # Should a crash come before the batch that uses it.
        )
        found = None
        try:
            found = await self._runner.create(wanted)
        finally:
            if found is None or found.id != wanted.id:
                await self._files.remove(wanted.owner, wanted.input_file_id)
        return await self._shown(found)

    async def _shown(self, batch: JobRecord) -> dict[str, Any]:
        record = None
        if batch.status is Status.COMPLETED:
            record = await self._context.threads.run(self._record, batch)
        driver = self._runner.driver(batch.id)
        is_in_engine = driver is not None and driver.is_in_engine
        return response_object(batch, record, is_in_engine=is_in_engine)

    def _record(self, batch: JobRecord) -> Any:
        has_failed = batch.progress.failed > 0
        file_id = batch.error_file_id if has_failed else batch.output_file_id
        try:
            return orjson.loads(self._context.directory.file(file_id).read_bytes())
        except (OSError, ValueError) as error:
            raise StorageError(f"the answer of {batch.id} cannot be read: {error}") from error
