"""Background responses: single requests that survive everything that a batch survives.

Each is a batch of one line. No list of batches has it, and no list of files its files; it is
deleted some days after its creation.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from hashlib import sha256
from itertools import chain
from typing import Any, Final

import orjson

from sglang_coserve.batch.admission import window_text
from sglang_coserve.batch.context import JobContext, new_id
from sglang_coserve.batch.errors import BatchRequestError, ConflictError
from sglang_coserve.batch.file_store import FileStore, once
from sglang_coserve.batch.job_supervisor import JobSupervisor
from sglang_coserve.batch.record import JobRecord, Status
from sglang_coserve.batch.response_object import (
    answer_events,
    batch_id_of,
    has_ended,
    opening_events,
    repeated_fields,
    response_object,
)
from sglang_coserve.batch.schemas import CreateResponse
from sglang_coserve.batch.state import CancelAsked
from sglang_coserve.batch.store import batch_rows
from sglang_coserve.errors import StorageError
from sglang_coserve.jsonl.request_line import BadLineError, parse_request_line
from sglang_coserve.jsonl.surrogates import mended_json
from sglang_coserve.lines.worker_threads import to_its_end

RESPONSES: Final = "/v1/responses"
_WINDOW_S: Final = 86_400.0
_LOOK_INTERVAL_S: Final = 0.5
_NOT_OF_THE_LINE: Final = {
    *("background", "stream", "stream_options", "store", "service_tier", "coserve_deadline_s")
}
_LEAVE_S: Final = 10.0
"""How long a response may need to leave the engine once it is cancelled: a step, usually."""


class BackgroundResponses:
    """Creates, shows, cancels and deletes responses.

    Methods raise ``NotFoundError`` for what an owner does not have, other ``BatchRequestError``
    for what cannot be asked, and ``StorageError`` when the disk fails.
    """

    def __init__(self, context: JobContext, files: FileStore, runner: JobSupervisor) -> None:
        self._context = context
        self._files = files
        self._runner = runner

    async def create(
        self, owner: str, request: CreateResponse, idempotency_key: str | None = None
    ) -> dict[str, Any]:
        """Begin a response. The same key and request again return the same one.

        Raises:
            BatchRequestError: it cannot be served in the background.
            ConflictError: the key was used for another request.
            TooManyError: too many responses have not ended.
            QuotaError: the owner has too much on the disk.
        """
        if RESPONSES not in self._context.backend.endpoints:
            raise BatchRequestError(
                f"this model does not serve {RESPONSES}", code="invalid_endpoint"
            )
        if request.previous_response_id is not None:
            raise BatchRequestError(
                "a background response continues no other: send the whole conversation as input",
                code="unsupported_parameter",
                param="previous_response_id",
            )
        line = await self._context.threads.run(self._line, request)
        wanted = self._wanted(owner, request, idempotency_key, line)
        return await to_its_end(self._create(wanted, line))

    async def retrieve(self, owner: str, response_id: str) -> dict[str, Any]:
        """Return one response."""
        batch_id = batch_id_of(response_id)
        batch = await self._context.store.run(batch_rows.find_response, batch_id, owner)
        return await self._shown(batch)

    async def cancel(self, owner: str, response_id: str) -> dict[str, Any]:
        """Cancel a response; one that is answered or has ended stays as it is."""
        await self.retrieve(owner, response_id)
        try:
            batch = await self._runner.change(batch_id_of(response_id), CancelAsked(), owner)
        except ConflictError:
            return await self.retrieve(owner, response_id)
        return await self._shown(batch)

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response.

        Raises:
            ConflictError: it has not ended.
        """
        now_s = self._context.clock.now_s()
        batch_id = batch_id_of(response_id)
        batch = await self._context.store.run(batch_rows.find_response, batch_id, owner)
        if batch.status is Status.CANCELLING:
            await self._runner.wait(batch_id, _LEAVE_S)
        await self._context.store.run(batch_rows.delete_response, batch_id, owner, now_s)
        await self._files.remove_expired(now_s)

    async def events(
        self, owner: str, response_id: str, after: int = -1
    ) -> AsyncGenerator[dict[str, Any] | None]:
        """Yield the events of a response with a ``sequence_number`` greater than ``after``.

        None where nothing has come for half a second. Ends early when the service is closed.
        """
        batch_id = batch_id_of(response_id)
        while True:
            is_led = self._runner.leads(batch_id)
            response = await self.retrieve(owner, response_id)
            is_over = has_ended(response)
            events = chain(opening_events(response), answer_events(response) if is_over else ())
            for number, event in enumerate(events):
                if number > after:
                    after = number
                    yield {**event, "sequence_number": number}
            if is_over or not is_led or not await self._runner.wait(batch_id, _LOOK_INTERVAL_S):
                return
            yield None

    async def remove_expired(self) -> None:
        """Delete the responses whose time is over; their files expire with them."""
        now_s = self._context.clock.now_s()
        created_by_s = now_s - self._context.limits.response_retention_s
        await self._context.store.run(batch_rows.delete_expired_responses, created_by_s, now_s)

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
            raise BatchRequestError(
                f"the body cannot be kept: {error}", code="invalid_value"
            ) from None
        return content + b"\n"

    def _wanted(
        self, owner: str, request: CreateResponse, idempotency_key: str | None, line: bytes
    ) -> JobRecord:
        now_s, rng = self._context.clock.now_s(), self._context.rng
        within_s = request.coserve_deadline_s or _WINDOW_S
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
            response=repeated_fields(request.model_dump(exclude_unset=True)),
        )

    async def _create(self, wanted: JobRecord, line: bytes) -> dict[str, Any]:
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
        return response_object(batch, record, is_in_engine=self._runner.is_in_engine(batch.id))

    def _record(self, batch: JobRecord) -> Any:
        has_failed = batch.progress.failed > 0
        file_id = batch.error_file_id if has_failed else batch.output_file_id
        try:
            return orjson.loads(self._context.directory.file(file_id).read_bytes())
        except (OSError, ValueError) as error:
            raise StorageError(f"the answer of {batch.id} cannot be read: {error}") from error
