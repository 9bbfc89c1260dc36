"""Background responses and chats: single requests that survive everything that a batch survives.

Each is a batch of one line. No list of batches has it, and no list of files its files; it is
deleted some days after its end. What a stream says follows from the object alone, so it can be
resumed at any event, also after a restart: three events before there is an answer, and the answer's
when it is complete.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from itertools import chain
from typing import Any, Final

import orjson

from sglang_coserve.batch.admission import window_text
from sglang_coserve.batch.context import JobContext, new_id
from sglang_coserve.batch.errors import BatchRequestError, ConflictError, NotFoundError
from sglang_coserve.batch.file_store import FileStore, once
from sglang_coserve.batch.job_supervisor import JobSupervisor
from sglang_coserve.batch.record import JobRecord, Status
from sglang_coserve.batch.schemas import CreateResponse
from sglang_coserve.batch.state import Asked
from sglang_coserve.batch.store import batch_rows
from sglang_coserve.errors import StorageError
from sglang_coserve.jsonl.body_limits import mended_json
from sglang_coserve.jsonl.request_line import BadLineError, parse_request_line
from sglang_coserve.lines.background import to_its_end

_REPEATED: Final = (
    *("model", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls"),
    *("reasoning", "temperature", "tool_choice", "top_logprobs", "top_p", "truncation", "user"),
)
"""Fields of a request that its object has from the start. Not those that may be large."""

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
CHATS: Final = "/v1/chat/completions"

ID_PREFIXES: Final[Mapping[str, str]] = {RESPONSES: "resp_", CHATS: "chatcmpl-"}
"""By endpoint. The rest of an id is that of the batch, 24 hexadecimal digits."""


def response_id_of(batch: JobRecord) -> str:
    """Return the id of the response or chat that a batch is."""
    return ID_PREFIXES[batch.endpoint] + batch.id.removeprefix("batch_")


def batch_id_of(response_id: str) -> str:
    """Return the id of the batch that a response or chat is."""
    return f"batch_{response_id[-24:]}"


def endpoint_of(response_id: str) -> str:
    """Return whose id it is: a chat's, or else a response's."""
    return CHATS if response_id.startswith(ID_PREFIXES[CHATS]) else RESPONSES


def response_object(
    batch: JobRecord, record: Mapping[str, Any] | None, *, is_in_engine: bool
) -> dict[str, Any]:
    """Return the object of the response or chat that ``batch`` is.

    ``record`` is that of its line, once the batch is complete; see ``encode_record``.
    """
    assert batch.response is not None
    answer, error = _outcome(batch, record)
    status = "failed" if error else _status(batch, is_in_engine=is_in_engine)
    if batch.endpoint == CHATS:
        return {
            "model": "default",
            "metadata": {},
            "usage": None,
            **batch.response,
            "choices": [],
            **answer,
            "id": response_id_of(batch),
            "object": "chat.completion",
            "created": int(batch.created_at_s),
            "status": status,
            "background": True,
            "error": error,
            "service_tier": "flex",
        }
    return {
        **_DEFAULTS,
        **batch.response,
        "status": status,
        "incomplete_details": None,
        "output": [],
        **answer,
        "id": response_id_of(batch),
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
        return {}, _error(answered["body"]["error"]["message"], is_request=True)
    return dict(answered["body"]), None


def _error(message: str, *, is_request: bool = False) -> dict[str, str]:
    # Of the codes that OpenAI's object may have, the closest ones.
    return {"code": "invalid_prompt" if is_request else "server_error", "message": message}


def opening_events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events before the answer, as far as the response has come."""
    before = {**response, "output": [], "usage": None, "error": None}
    before |= {"completed_at": None, "incomplete_details": None}
    steps = ["created", "queued"]
    if response["status"] != "queued":
        steps.append("in_progress")
    for step in steps:
        status = "in_progress" if step == "in_progress" else "queued"
        yield {"type": f"response.{step}", "response": {**before, "status": status}}


def answer_events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a response that has ended."""
    for index, item in enumerate(response["output"]):
        place = {"output_index": index, "item_id": item.get("id")}
        begun = {**item, "status": "in_progress"}
        if item["type"] == "message":
            begun["content"] = []
        elif item["type"] == "function_call":
            begun["arguments"] = ""
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        if item["type"] == "message":
            for at, part in enumerate(item["content"]):
                yield from _part_events(part, {**place, "content_index": at})
        elif item["type"] == "function_call":
            said, kind = item["arguments"], "response.function_call_arguments"
            yield {"type": f"{kind}.delta", **place, "delta": said}
            yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": said}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    # OpenAI has no event of its own for a cancelled one.
    status = response["status"]
    kind = "failed" if status == "cancelled" else status
    yield {"type": f"response.{kind}", "response": response}


def _part_events(part: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    is_text = part["type"] == "output_text"
    begun = {**part, "text": "", "annotations": []} if is_text else part
    yield {"type": "response.content_part.added", **place, "part": begun}
    if is_text:
        logprobs = part.get("logprobs") or []
        said = {**place, "logprobs": logprobs}
        yield {"type": "response.output_text.delta", **said, "delta": part["text"]}
        yield {"type": "response.output_text.done", **said, "text": part["text"]}
    yield {"type": "response.content_part.done", **place, "part": part}


_WINDOW_S: Final = 86_400.0
_LOOK_INTERVAL_S: Final = 0.5
_NOT_OF_THE_LINE: Final = {
    *("background", "stream", "stream_options", "store", "service_tier", "coserve_deadline_s")
}
_LEAVE_S: Final = 10.0
"""How long a response may need to leave the engine once it is cancelled: a step, usually."""


class BackgroundResponses:
    """Creates, shows, cancels and deletes responses and chats.

    Methods raise ``NotFoundError`` for what an owner does not have, other ``BatchRequestError``
    for what cannot be asked, and ``StorageError`` when the disk fails.
    """

    def __init__(self, context: JobContext, files: FileStore, runner: JobSupervisor) -> None:
        self._context = context
        self._files = files
        self._runner = runner

    async def create(
        self,
        owner: str,
        request: CreateResponse,
        idempotency_key: str | None = None,
        endpoint: str = RESPONSES,
    ) -> dict[str, Any]:
        """Begin a response, or a chat. The same key and request again return the same one.

        Raises:
            BatchRequestError: it cannot be served in the background.
            ConflictError: the key was used for another request.
            TooManyError: too many responses have not ended.
            QuotaError: the owner has too much on the disk.
        """
        if endpoint not in self._context.backend.endpoints:
            raise BatchRequestError(
                f"this model does not serve {endpoint}", code="invalid_endpoint"
            )
        if endpoint == CHATS and request.stream:
            raise BatchRequestError(
                f"a chat in the background has no stream: leave it out, or use {RESPONSES}",
                code="unsupported_parameter",
                param="stream",
            )
        if request.previous_response_id is not None:
            raise BatchRequestError(
                "a background response continues no other: send the whole conversation as input",
                code="unsupported_parameter",
                param="previous_response_id",
            )
        line = await self._context.threads.run(self._line, request, endpoint)
        wanted = self._wanted(owner, request, idempotency_key, line, endpoint)
        return await to_its_end(self._create(wanted, line))

    async def retrieve(self, owner: str, response_id: str) -> dict[str, Any]:
        """Return one response or chat."""
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
        await self._context.store.run(
            batch_rows.delete_response, batch.id, batch.endpoint, owner, now_s
        )
        for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            with suppress(NotFoundError):  # There was none, or it has expired.
                await self._files.remove(owner, file_id)

    async def events(
        self, owner: str, response_id: str, after: int = -1
    ) -> AsyncGenerator[dict[str, Any] | None]:
        """Yield the events of a response with a ``sequence_number`` greater than ``after``.

        None where nothing has come for half a second. Ends early when the service is closed.
        """
        while True:
            # Before the look: what ends after it is looked at once more.
            driver = self._runner.driver(batch_id_of(response_id))
            batch = await self._find(owner, response_id)
            response = await self._shown(batch)
            is_over = has_ended(response)
            # Without the answer, which says more of itself: a replay repeats what was said.
            begun = response_object(batch, None, is_in_engine=response["status"] != "queued")
            events = chain(opening_events(begun), answer_events(response) if is_over else ())
            for number, event in enumerate(events):
                if number > after:
                    after = number
                    yield {**event, "sequence_number": number}
            if is_over or driver is None:
                return
            await asyncio.wait({driver.task}, timeout=_LOOK_INTERVAL_S)
            if driver.task.cancelled():
                return
            yield None

    async def remove_expired(self) -> None:
        """Delete the responses whose time is over; their files expire with them."""
        now_s = self._context.clock.now_s()
        ended_by_s = now_s - self._context.limits.response_retention_s
        store, delete = self._context.store, batch_rows.delete_expired_responses
        while await store.run(delete, ended_by_s, now_s):
            pass

    async def _find(self, owner: str, response_id: str) -> JobRecord:
        return await self._context.store.run(
            batch_rows.find_response, batch_id_of(response_id), endpoint_of(response_id), owner
        )

    def _line(self, request: CreateResponse, endpoint: str) -> bytes:
        """Return the only line of the batch. It was checked, as nothing checks it later."""
        body = request.model_dump(exclude_unset=True, exclude=_NOT_OF_THE_LINE)
        line = {"custom_id": "response", "method": "POST", "url": endpoint, "body": body}
        try:
            content = orjson.dumps(line)
        except TypeError:  # Lone surrogates, say, which are served as in the line of a file.
            content = mended_json(json.dumps(line).encode())
        try:
            parse_request_line(content, endpoint)
        except BadLineError as error:
            raise BatchRequestError(
                f"the body cannot be kept: {error}", code="invalid_value"
            ) from None
        return content + b"\n"

    def _wanted(
        self,
        owner: str,
        request: CreateResponse,
        idempotency_key: str | None,
        line: bytes,
        endpoint: str,
    ) -> JobRecord:
        now_s, rng = self._context.clock.now_s(), self._context.rng
        within_s = request.coserve_deadline_s or _WINDOW_S
        body = request.model_dump(include=set(_REPEATED), exclude_none=True, exclude_unset=True)
        return JobRecord(
            id=new_id("batch_", rng),
            owner=owner,
            endpoint=endpoint,
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
            response=body,
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
