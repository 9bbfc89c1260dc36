"""SGLang's OpenAI routes, as far as the lines of a batch may name them, and the thread they run in.

What a handler does before and after it generates takes as long as a request is large:
prompts are rendered and tokenized, answers become objects and JSON. A coroutine needs no
event loop for that; it is continued step by step in a thread, and whatever it has to wait for
is awaited on the loop in its place.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.entrypoints.openai.serving_embedding import OpenAIServingEmbedding

from sglang_coserve.errors import RequestError
from sglang_coserve.lines.background import WorkerThreads
from sglang_coserve.srt.marks.request_marks import check_line_marks
from sglang_coserve.srt.optional_parts import GUARD
from sglang_coserve.thread_loop import thread_loop

_MOST_FAULTS = 3
"""Faults of a body that are shown: a bad member of a union has one for each alternative."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route: the model of its body, and SGLang's handler."""

    body_type: Any
    """Validates a body with ``validate_python``."""

    handler: Any
    method: str = "handle_request"
    fixed_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the Batch API sets, overriding the body."""

    def parse(self, body: Mapping[str, Any]) -> BaseModel:
        """Return the request that ``body`` describes.

        Raises:
            RequestError: it describes none, or one that has no place in a batch.
        """
        check_line_marks(body)
        try:
            # SGLang's models change what they are given: the body is this attempt's own.
            request: BaseModel = self.body_type.validate_python({**body, **self.fixed_fields})
        except ValidationError as error:
            raise RequestError(_message(error)) from None
        except Exception as error:
            # Models also look into a body before its types are checked.
            raise RequestError(f"malformed body: {type(error).__name__}: {error}") from error
        for name in ("stream", "background"):
            if getattr(request, name, False):
                raise RequestError(
                    f"{name}: a line of a batch is answered once, in the output file: leave it out"
                )
        return request

    async def serve(self, request: BaseModel, tokenizer_manager: Any) -> Any:
        """Return the answer of SGLang's handler, which generates with ``tokenizer_manager``."""
        # A copy, for a handler holds one tokenizer manager, and some state of a request.
        handler = copy.copy(self.handler)
        handler.tokenizer_manager = tokenizer_manager
        return await getattr(handler, self.method)(request, None)


def model_endpoints(tokenizer_manager: Any, template_manager: Any) -> dict[str, Endpoint]:
    """Return, by path, the endpoints that the loaded model supports."""
    managers = (tokenizer_manager, template_manager)
    if not tokenizer_manager.is_generation:
        handler = OpenAIServingEmbedding(*managers)
        return {"/v1/embeddings": Endpoint(_body(protocol.EmbeddingRequest), handler)}
    if tokenizer_manager.tokenizer is None:
        return {}  # Without a tokenizer there is no text to answer with.
    completions = Endpoint(_body(protocol.CompletionRequest), OpenAIServingCompletion(*managers))
    endpoints = {"/v1/completions": completions}
    chat = tokenizer_manager.serving_chat_class(*managers)
    has_template = template_manager.chat_template_name is not None or getattr(
        tokenizer_manager.tokenizer, "chat_template", None
    )
    if has_template or chat.chat_encoding_spec is not None:
        endpoints["/v1/chat/completions"] = Endpoint(_body(protocol.ChatCompletionRequest), chat)
        if (responses := _responses_handler(*managers)) is not None:
            endpoints["/v1/responses"] = Endpoint(
                _body(protocol.ResponsesRequest),
                responses,
                method="create_responses",
                # SGLang keeps stored responses in memory for as long as it runs.
                fixed_fields={"store": False},
            )
    return endpoints


def _body(model: type[BaseModel]) -> Any:
    return GUARD.body_validator(TypeAdapter(model))


def _responses_handler(tokenizer_manager: Any, template_manager: Any) -> Any:
    """Return SGLang's handler for responses; None where it does not come up."""
    try:
        # Needs packages and, for some models, files that SGLang does without elsewhere.
        from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

        return OpenAIServingResponses(tokenizer_manager, template_manager)
    except Exception as error:
        logger.warning("no /v1/responses in batches: %s: %s", type(error).__name__, error)
        return None


def _message(error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    shown = [
        f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}"
        for fault in faults[:_MOST_FAULTS]
    ]
    if len(faults) > _MOST_FAULTS:
        shown.append(f"and {len(faults) - _MOST_FAULTS} more")
    return "; ".join(shown)


_T = TypeVar("_T")


class OnLoop:
    """Awaited by a coroutine in the thread: what ``make()`` returns is awaited on the loop."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.make = make

    def __await__(self) -> Generator[OnLoop, Any, Any]:
        return (yield self)


@dataclass(frozen=True, slots=True)
class _Done(Generic[_T]):
    value: _T


class HandlerThread:
    """One thread, so that no two handlers are in the middle of a step: they share objects that
    were made for one event loop."""

    def __init__(self) -> None:
        self._thread = WorkerThreads("coserve-lines", 1)  # Ends with the process.

    async def run(self, handler: Coroutine[Any, Any, _T]) -> _T:
        """Return what ``handler`` returns, which awaits nothing but ``OnLoop``.

        When the call is cancelled, so is at once what it waits for, and the handler is closed.
        """
        step: Callable[[], Any] = partial(handler.send, None)
        try:
            while True:
                state = await self._thread.run(_advanced, step)
                if isinstance(state, _Done):
                    value: _T = state.value
                    return value
                try:
                    step = partial(handler.send, await state.make())
                except Exception as error:
                    step = partial(handler.throw, error)
        finally:
            handler.close()


def _advanced(step: Callable[[], Any]) -> Any:
    """Continue a handler; return what it waits for, or ``_Done``."""
    try:
        with thread_loop():
            asked = step()
    except StopIteration as stop:
        return _Done(stop.value)
    if not isinstance(asked, OnLoop):
        raise RuntimeError(f"a handler waits for {asked!r}, which only an event loop could give")
    return asked
