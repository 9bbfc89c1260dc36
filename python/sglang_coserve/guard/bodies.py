"""Refuses large bodies before they are parsed; answers invalid ones soon, as the client's fault.

Received bytes are parsed in small pieces, so that the event loop is not blocked.

An ASGI middleware measures bodies from their raw bytes and keeps at most the limit. It answers
larger bodies with 413, and bodies that are not UTF-8 with 400. The app behind it gets the
whole body, without halves of surrogate pairs.

A null says of a field what leaving it out says, as with OpenAI: many clients write all fields.

Validation stops at the first invalid item of a list. Pydantic reports every one, for every
alternative of a union: a body of 1 MiB can have three million errors, which block the event loop
for half a minute.

Fields of chats are mended or refused where all bodies are validated (``chat_fields``).

SGLang's models of OpenAI bodies read fields before their types are checked, and its parsers are
made for the name that a client gives. The exceptions that follow are answered with 400 instead of
500.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from traceback import walk_tb
from typing import Any, Final, LiteralString

from fastapi.responses import JSONResponse
from pydantic import TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticUseDefault, SchemaValidator
from pydantic_core.core_schema import no_info_before_validator_function
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.h11_impl import H11Protocol

from sglang_coserve.guard.chat_fields import CHAT_FIELDS
from sglang_coserve.jsonl.body_limits import (
    BodyCheck,
    BodyLimits,
    BodyNotTextError,
    BodyTooLargeError,
    mended_json,
)
from sglang_coserve.told_faults import told_faults
from sglang_coserve.web.asgi import is_form, openai_error, replay, route_path, send_error

# --- How large a body may be -----------------------------------------------------------------

_BYTES_PER_TOKEN: Final = 16
"""Largest body, in bytes per token of the context, if that is more than 4 MiB: non-ASCII
characters may be escapes of 6 bytes, a few of which make a token."""

_MULTIMODAL_BYTES: Final = 64 << 20
"""Largest body for a multimodal model, as images and sounds are base64 text in the body."""


def body_limits(manager: Any) -> BodyLimits:
    """Return the limits of request bodies for the model of a tokenizer manager."""
    most, default = max_tokens(manager), BodyLimits()
    max_bytes = most_text_chars(manager)
    if manager.model_config.is_multimodal:
        max_bytes = max(max_bytes, _MULTIMODAL_BYTES)
    # Room for a prompt of token ids and its other fields.
    max_values = max(default.max_values, most + default.max_objects)
    context_tokens = int(manager.context_len)
    return replace(
        default, max_bytes=max_bytes, max_values=max_values, context_tokens=context_tokens
    )


def most_text_chars(manager: Any) -> int:
    """Return the most characters of texts that are tokenized at once, as in bodies of texts."""
    return max(BodyLimits().max_bytes, _BYTES_PER_TOKEN * max_tokens(manager))


def max_tokens(manager: Any) -> int:
    """Return the longest prompt of the model of a tokenizer manager, in tokens."""
    # The limit of the KV pool is known once the scheduler is running.
    return int(min(manager.context_len, manager.max_req_input_len or manager.context_len))


_FREE_PATHS: Final = frozenset(
    {
        "/update_weights_from_tensor",
        "/load_lora_adapter_from_tensors",
    }
)
"""For operators only."""

_FORM_PATH: Final = "/v1/audio/transcriptions"
"""Takes a form, which is spooled to a file."""

_MOST_HELD_BYTES: Final = 1 << 30
"""Most bytes of all unfinished bodies together: sixteen of the largest bodies with images."""

_STALLED_S: Final = 60.0
"""Longest wait for the next piece of a body, as for a body of ``POST /v1/responses``."""

_SIZE: Final = "coserve_body_bytes"


def body_bytes(scope: Scope) -> int:
    """Return the size of a body that passed the gate; 0 for any other."""
    size_bytes = scope.get(_SIZE, 0)
    return int(size_bytes)


class _TooManyBodiesError(Exception):
    """The unfinished bodies of all clients hold as much memory as they may."""


class RequestGateMiddleware:
    """Refuses bodies that are too large, too many at a time, or never complete."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Callable[[], BodyLimits] = BodyLimits,
        free_prefixes: tuple[str, ...] = (),
    ) -> None:
        """``free_prefixes`` are of paths whose routes bound by themselves what they read."""
        self._app = app
        self._limits = limits
        self._free_prefixes = free_prefixes
        self._held_bytes = 0
        """Bytes of unfinished bodies."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if not self._is_measured(scope):
            await self._app(scope, receive, send)
            return
        chunks: list[bytes] = []
        try:
            is_complete = await self._receive(chunks, receive)
        except BodyTooLargeError as error:
            await send_error(send, 413, str(error))
        except BodyNotTextError as error:
            await send_error(send, 400, str(error))
        except TimeoutError:
            await send_error(send, 408, f"no more of the body has come for {_STALLED_S:.0f} s")
        except _TooManyBodiesError:
            await send_error(send, 503, "too many bodies are on their way: send it again later")
        else:
            if is_complete:
                body = mended_json(b"".join(chunks))
                await self._app({**scope, _SIZE: len(body)}, replay(body, receive), send)

    async def _receive(self, chunks: list[bytes], receive: Receive) -> bool:
        """Receive a whole body in pieces; return False if the client has disconnected."""
        check = BodyCheck(self._limits())
        taken_bytes = 0
        try:
            while True:
                async with asyncio.timeout(_STALLED_S):
                    message = await receive()
                if message["type"] != "http.request":
                    return False
                chunks.append(content := message.get("body", b""))
                is_complete = not message.get("more_body", False)
                check.take(content, is_last=is_complete)
                if is_complete:
                    return True
                if self._held_bytes + len(content) > _MOST_HELD_BYTES:
                    raise _TooManyBodiesError
                taken_bytes += len(content)
                self._held_bytes += len(content)
        finally:
            self._held_bytes -= taken_bytes

    def _is_measured(self, scope: Scope) -> bool:
        # Whatever its method: some of SGLang's routes parse the body of a GET, too.
        if scope["type"] != "http":
            return False
        path = route_path(scope)
        if path in _FREE_PATHS or path.startswith(self._free_prefixes):
            return False
        return path != _FORM_PATH or not is_form(scope)


# --- What is wrong with a body ---------------------------------------------------------------


_LISTS: Final = frozenset({"list", "tuple", "set", "frozenset"})
_FIELDS: Final = frozenset({"model-field", "typed-dict-field"})
_NOT_SCHEMAS: Final = frozenset({"config", "default", "expected", "metadata", "serialization"})
_MOST_FAULTS: Final = 100
"""With more errors only their number is reported: an object may still have one for each key."""


class FailFast:
    """A Pydantic ``TypeAdapter`` whose validation stops at the first invalid item of a list, and
    that takes null for a field with a default, which the field then has."""

    def __init__(self, adapter: TypeAdapter[Any]) -> None:
        self._adapter = adapter
        # Not with the prebuilt validators of nested models, which report every error.
        schema = _failing_fast(adapter.core_schema, mends=True)
        self._validator = SchemaValidator(schema, None, _use_prebuilt=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def validate_python(self, value: Any, **options: Any) -> Any:
        """See ``TypeAdapter.validate_python``.

        Raises:
            ValidationError: the value is invalid; reports at most a hundred errors.
        """
        try:
            return self._validator.validate_python(value, **options)
        except ValidationError as error:
            count = error.error_count()
            if count <= _MOST_FAULTS:
                raise
            raise _one_fault(error, "too_many_faults", f"it has {count} faults") from None


class _FailFastModel:
    """The validator of a model that handlers make from a body: it stops at the first invalid item
    of a list, too, and tells its faults in one."""

    def __init__(self, model: Any) -> None:
        self._own = model.__pydantic_validator__
        schema = _failing_fast(model.__pydantic_core_schema__, mends=False)
        self._validator = SchemaValidator(schema, None, _use_prebuilt=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def validate_python(self, value: Any, **options: Any) -> Any:
        """See ``SchemaValidator.validate_python``."""
        try:
            return self._validator.validate_python(value, **options)
        except ValidationError as error:
            told, _ = told_faults(
                [{**fault, "loc": (None, *fault["loc"])} for fault in _few(error)]
            )
            raise _one_fault(error, "faults", told) from None


def install_fail_fast_chats() -> None:
    """Bound the errors of chats that SGLang makes from bodies of other routes."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    if not isinstance(ChatCompletionRequest.__pydantic_validator__, _FailFastModel):
        ChatCompletionRequest.__pydantic_validator__ = _FailFastModel(ChatCompletionRequest)


def _few(error: ValidationError) -> list[Any]:
    return error.errors(include_url=False, include_input=False, include_context=False)


def _one_fault(error: ValidationError, kind: LiteralString, told: str) -> ValidationError:
    fault = PydanticCustomError(kind, "{told}", {"told": told})
    details = [InitErrorDetails(type=fault, loc=(), input=None)]
    return ValidationError.from_exception_data(error.title, details)


def install_fail_fast(app: Any) -> None:
    """Use ``FailFast`` for the bodies of all routes of a FastAPI application."""
    for route in app.routes:
        for field in getattr(getattr(route, "dependant", None), "body_params", ()):
            if isinstance(field._type_adapter, TypeAdapter):
                field._type_adapter = FailFast(field._type_adapter)


def _failing_fast(schema: Any, *, mends: bool) -> Any:
    """Return the schema with validation that stops early; ``mends`` says whether fields are mended
    as those of bodies are."""
    if isinstance(schema, dict):
        changed = {
            key: value if key in _NOT_SCHEMAS else _failing_fast(value, mends=mends)
            for key, value in schema.items()
        }
        # A model may have a field named "type", whose schema is a dict.
        if isinstance(changed.get("type"), str) and changed["type"] in _LISTS:
            changed["fail_fast"] = True
        if not mends:
            return changed
        changed = {key: _mended(key, value) for key, value in changed.items()}
        if changed.get("type") == "default" and "schema" in schema:
            inner = changed["schema"]
            changed["schema"] = no_info_before_validator_function(_not_null, inner)
        return changed
    if isinstance(schema, list | tuple):
        return type(schema)(_failing_fast(each, mends=mends) for each in schema)
    return schema


def _mended(name: str, schema: Any) -> Any:
    """Return the schema of a field of a model, whose value goes through ``CHAT_FIELDS``."""
    mend = CHAT_FIELDS.get(name)
    if mend is None or not isinstance(schema, dict) or schema.get("type") not in _FIELDS:
        return schema
    inner = schema["schema"]
    if inner.get("type") == "default":  # A field's own, which must stay the outer one.
        inner = {**inner, "schema": no_info_before_validator_function(mend, inner["schema"])}
    else:
        inner = no_info_before_validator_function(mend, inner)
    return {**schema, "schema": inner}


def _not_null(value: Any) -> Any:
    """Have Pydantic take the default of a field that is null."""
    if value is None:
        raise PydanticUseDefault
    return value


_READERS: Final = frozenset(
    {
        __name__,
        "sglang.srt.entrypoints.openai.protocol",
        "sglang.srt.function_call.function_call_parser",
        "sglang.srt.parser.reasoning_parser",
    }
)
"""Modules that read what a client gives, and raise on it."""

_MANAGER: Final = "sglang_coserve.guard.tokenizer_manager"
"""Raises a ValueError for a request that is invalid, which Ollama's routes do not expect."""

_ERRORS: Final = (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)


def install_body_errors(app: Any) -> None:
    """Install handlers in SGLang's app that tell malformed bodies from faults of the server."""
    for kind in _ERRORS:
        app.add_exception_handler(kind, _answer)


async def _answer(_request: Any, error: Exception) -> JSONResponse:
    """Answer with 400 if ``error`` was raised by what reads a body; any other stays a 500.

    Raises:
        Exception: ``error`` itself, if it was not raised there.
    """
    readers = _READERS | {_MANAGER} if isinstance(error, ValueError) else _READERS
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    if all(frame.f_globals.get("__name__") not in readers for frame in frames):
        raise error
    is_told = isinstance(error, ValueError)
    message = str(error) if is_told else f"malformed body: {type(error).__name__}: {error}"
    return JSONResponse(openai_error(400, message), status_code=400)


_TURN_S: Final = 0.001
"""Parsing time after which the event loop runs other tasks. On an AMD EPYC 100 kB of plain body, or
40 chunks, are parsed in it."""

_LEAST_BYTES: Final = 256
_FIRST_BYTES: Final = 1 << 12
_MOST_BYTES: Final = 1 << 14
"""Least, initial and largest number of bytes parsed at once, adapted to the measured speed. As
chunks of one byte they take 0.4, 6 and 25 ms on that machine."""


class PacedProtocol(H11Protocol):
    """Uvicorn's HTTP protocol, with parsing spread over several turns of the event loop.

    Uvicorn parses all received bytes, up to 256 KiB, in one call, in Python. If these are
    chunks of one byte each, the call takes more than a second.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unparsed = bytearray()
        self._is_behind = False
        self._piece_bytes = _FIRST_BYTES

    def data_received(self, data: bytes) -> None:
        """Buffer received bytes, and parse them unless parsing is behind already."""
        self._unparsed += data
        if not self._is_behind:
            self._parse()

    def connection_lost(self, exc: Exception | None) -> None:
        """Discard bytes not yet parsed: nobody waits for a response."""
        self._unparsed.clear()
        super().connection_lost(exc)

    def _parse(self) -> None:
        end_s = time.perf_counter() + _TURN_S
        while self._unparsed:
            piece = bytes(self._unparsed[: self._piece_bytes])
            del self._unparsed[: self._piece_bytes]
            super().data_received(piece)
            if self.transport.is_closing():
                self._unparsed.clear()
            elif time.perf_counter() > end_s:
                self._piece_bytes = max(self._piece_bytes // 2, _LEAST_BYTES)
                break
            else:
                self._piece_bytes = min(2 * self._piece_bytes, _MOST_BYTES)
        was_behind, self._is_behind = self._is_behind, bool(self._unparsed)
        if self._is_behind:
            self.transport.pause_reading()
            self.loop.call_soon(self._parse)
        elif was_behind and not (self.flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()


def install_paced_protocol() -> None:
    """Make ``PacedProtocol`` uvicorn's default HTTP protocol in this process."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{PacedProtocol.__name__}"
