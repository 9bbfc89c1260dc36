"""Serves lines of batches with SGLang's own OpenAI handlers, without HTTP."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from asgi_correlation_id import correlation_id
from pydantic import BaseModel
from starlette.responses import Response

from sglang_coserve.errors import RequestError
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.jsonl.request_line import not_served, served_name
from sglang_coserve.lines.backend import (
    Backend,
    BackendLoad,
    ChangeListeners,
    LineMovedError,
    LineRequest,
    LineResult,
    MovedKv,
    TokenRate,
)
from sglang_coserve.srt.batch_backend.endpoints import Endpoint, HandlerThread, model_endpoints
from sglang_coserve.srt.batch_backend.line_manager import LineManager
from sglang_coserve.srt.batch_backend.loaded_model import (
    kv_in_use,
    model_in_use,
    model_names,
)
from sglang_coserve.srt.monitoring.otel_metrics import note_operation
from sglang_coserve.srt.monitoring.scheduler_query import (
    BATCH_DELAYS,
    ask,
    sum_of_delays_s,
)
from sglang_coserve.srt.optional_parts import GUARD
from sglang_coserve.told_faults import without_directories

logger = logging.getLogger(__name__)


def line_result(request_id: str, answer: Any) -> LineResult:
    """Return the result for a handler's answer: a model, or a response with an error."""
    if isinstance(answer, BaseModel):
        return LineResult(HTTPStatus.OK.value, request_id, answer.model_dump(mode="json"))
    assert isinstance(answer, Response), f"a handler answered {type(answer).__name__}"
    content = orjson.loads(answer.body)
    # Chat, completions and embeddings return flat errors, responses nest them as OpenAI does.
    error = content.get("error", content)
    fields = {name: error.get(name) for name in ("message", "type", "param", "code")}
    return LineResult(
        answer.status_code,
        request_id,
        {"error": fields},
        is_retryable=answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR,
    )


class BatchBackend(Backend):
    """See ``batch.backend.Backend``. Lives on the event loop of SGLang's tokenizer manager.

    ``fingerprint`` is that of the model that was loaded at the start. ``let_leave`` lets the
    request of a line leave with its KV for another engine, None if no KV is moved.
    ``expected_tokens_per_s`` is the rate of offline tokens before any was served, None if unknown.
    ``stalled_by`` returns why the engine serves no lines, None while it does.
    """

    def __init__(
        self,
        tokenizer_manager: Any,
        template_manager: Any,
        *,
        fingerprint: str,
        let_leave: Callable[[LineManager], None] | None = None,
        expected_tokens_per_s: float | None = None,
        stalled_by: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._stalled_by = stalled_by
        self._tokenizer_manager = tokenizer_manager
        self._fingerprint = fingerprint
        self._let_leave = let_leave
        self._managers: dict[int, LineManager] = {}
        """Of the lines that are being run, by the identity of their requests."""

        self._endpoints = model_endpoints(tokenizer_manager, template_manager)
        self._thread = HandlerThread()
        self._rate = TokenRate(time.monotonic, expected_per_s=expected_tokens_per_s)

    @property
    def model(self) -> str:
        """What the tokens belong to; weights that are exchanged while it runs have another name."""
        return model_in_use(self._tokenizer_manager, self._fingerprint)

    @property
    def is_changing(self) -> bool:
        """See ``Backend.is_changing``."""
        return bool(self._tokenizer_manager.coserve_weights.is_changing)

    def when_changing(self, take_out: Callable[[], None]) -> Callable[[], None]:
        """See ``Backend.when_changing``."""
        listeners: ChangeListeners = self._tokenizer_manager.coserve_weights.listeners
        return listeners.add(take_out)

    async def settled(self) -> None:
        """See ``Backend.settled``."""
        await self._tokenizer_manager.coserve_weights.settled()

    @property
    def endpoints(self) -> frozenset[str]:
        """The endpoints that the loaded model can serve."""
        return frozenset(self._endpoints)

    @property
    def limits(self) -> BodyLimits:
        """What one line may be."""
        return GUARD.body_limits(self._tokenizer_manager)

    @property
    def model_names(self) -> tuple[str, ...]:
        """See ``Backend.model_names``."""
        return model_names(self._tokenizer_manager)

    @property
    def stalled_by(self) -> str | None:
        """See ``Backend.stalled_by``."""
        return self._stalled_by()

    @property
    def is_stopping(self) -> bool:
        """True once the server waits for all requests to end before it stops.

        It waits for lines in flight too, unless they are cancelled.
        """
        return bool(self._tokenizer_manager.gracefully_exit)

    def load(self) -> BackendLoad:
        """See ``Backend.load``; the rate is that of the lines served here."""
        # A line may have several of SGLang's requests, which only makes an upload polite.
        num_others = len(self._tokenizer_manager.rid_to_state) - self._rate.num_in_flight
        return BackendLoad(
            self._rate.per_s(),
            is_online_busy=num_others > 0,
            total_tokens=self._rate.total_tokens,
        )

    async def online_delays_s(self) -> Mapping[str, float] | None:
        """See ``Backend.online_delays_s``; the schedulers are asked."""
        return sum_of_delays_s(await ask(self._tokenizer_manager, BATCH_DELAYS))

    def hand_back(self, request: LineRequest) -> bool:
        """See ``Backend.hand_back``: if KV is moved, what the scheduler has and can go on."""
        manager = self._managers.get(id(request))
        if self._let_leave is None or manager is None or not manager.can_leave:
            return False
        self._let_leave(manager)
        return True

    def prompt_tokens(self, request: LineRequest) -> int | None:
        """See ``Backend.prompt_tokens``."""
        manager = self._managers.get(id(request))
        return manager.prompt_tokens if manager is not None and manager.can_leave else None

    async def run(
        self, request: LineRequest, on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        """See ``Backend.run``."""
        request_id = uuid.uuid4().hex
        correlation_id.set(request_id)  # In the log as in the line's record.
        endpoint = self._endpoints.get(request.endpoint)
        if endpoint is None:
            known = ", ".join(sorted(self._endpoints))
            message = f"this model does not serve {request.endpoint}: use one of {known}"
            return LineResult.refused(400, message, request_id)
        asked, names = request.body.get("model"), self.model_names
        name = served_name(asked, names)
        if name is None:
            body = {"error": not_served(asked, names)}
            return LineResult(HTTPStatus.NOT_FOUND.value, request_id, body)
        if asked in names[1:]:
            request.body["model"] = name  # SGLang knows an adapter by this name alone.

        note_operation(request.endpoint)
        num_reported = 0

        def report(token_ids: Sequence[int]) -> None:
            nonlocal num_reported
            num_reported += len(token_ids)
            self._rate.add(len(token_ids))
            on_tokens(token_ids)

        manager = LineManager(
            self._tokenizer_manager,
            request,
            request_id,
            report,
            kv_model=kv_in_use(self._tokenizer_manager, self._fingerprint),
            takes_kv=self._let_leave is not None,
        )
        self._managers[id(request)] = manager
        with self._rate.in_flight():
            try:
                result = await self._thread.run(_served(endpoint, request, manager, request_id))
            except RequestError as error:
                return LineResult.refused(400, str(error), request_id)
            except Exception as error:
                logger.exception("line %d of %s failed", request.line, request.batch_id)
                failure = without_directories(f"{type(error).__name__}: {error}")
                result = LineResult.refused(503, failure, request_id)
            finally:
                del self._managers[id(request)]
            if manager.tokens_left is not None:
                kv = MovedKv(request_id, manager.tokens_left) if manager.tokens_left else None
                raise LineMovedError("the line was handed back", kv)
            if manager.failure is not None:
                return LineResult.refused(503, manager.failure, request_id)
            usage = result.body.get("usage") or {}
            self._rate.add(max(0, usage.get("total_tokens", 0) - num_reported))
        return result


async def _served(
    endpoint: Endpoint, request: LineRequest, manager: LineManager, request_id: str
) -> LineResult:
    parsed = endpoint.parse(request.body)
    return line_result(request_id, await endpoint.serve(parsed, manager))
