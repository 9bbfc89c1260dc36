"""Answers invalid bodies soon, and as the fault of the client.

Validation stops at the first invalid item of a list. Pydantic reports every one, for every
alternative of a union: a body of 1 MiB can have three million errors, which block the event loop
for half a minute.

SGLang's models of OpenAI bodies read fields before their types are checked. The exceptions that
follow are answered with 400 instead of 500.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fastapi.responses import JSONResponse
from pydantic import TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, SchemaValidator

from sglang_coserve.asgi import error_content

__all__ = ["FailFast", "install_body_errors", "install_fail_fast"]

_LISTS: Final = frozenset({"list", "tuple", "set", "frozenset"})
_NOT_SCHEMAS: Final = frozenset({"config", "default", "expected", "metadata", "serialization"})
_MOST_FAULTS: Final = 100
"""With more errors only their number is reported: an object may still have one for each key."""


class FailFast:
    """A Pydantic ``TypeAdapter`` whose validation stops at the first invalid item of a list."""

    def __init__(self, adapter: TypeAdapter[Any]) -> None:
        self._adapter = adapter
        # Not with the prebuilt validators of nested models, which report every error.
        self._validator = SchemaValidator(
            _failing_fast(adapter.core_schema), None, _use_prebuilt=False
        )

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
            fault = PydanticCustomError(
                "too_many_faults", "it has {count} faults", {"count": count}
            )
            details = [InitErrorDetails(type=fault, loc=(), input=None)]
            raise ValidationError.from_exception_data(error.title, details) from None


def install_fail_fast(app: Any) -> None:
    """Use ``FailFast`` for the bodies of all routes of a FastAPI application."""
    for route in app.routes:
        for field in getattr(getattr(route, "dependant", None), "body_params", ()):
            if isinstance(field._type_adapter, TypeAdapter):
                field._type_adapter = FailFast(field._type_adapter)


def _failing_fast(schema: Any) -> Any:
    if isinstance(schema, dict):
        changed = {
            key: value if key in _NOT_SCHEMAS else _failing_fast(value)
            for key, value in schema.items()
        }
        # A model may have a field named "type", whose schema is a dict.
        if isinstance(changed.get("type"), str) and changed["type"] in _LISTS:
            changed["fail_fast"] = True
        return changed
    if isinstance(schema, list | tuple):
        return type(schema)(_failing_fast(each) for each in schema)
    return schema


_MODELS: Final = "sglang.srt.entrypoints.openai.protocol"
_ERRORS: Final = (AttributeError, IndexError, KeyError, RecursionError, TypeError)


def install_body_errors(app: Any) -> None:
    """Install handlers in SGLang's app that tell malformed bodies from faults of the server."""
    for kind in _ERRORS:
        app.add_exception_handler(kind, _answer)


async def _answer(_request: Any, error: Exception) -> JSONResponse:
    """Answer with 400 if ``error`` was raised in a model of a body; any other stays a 500.

    Raises:
        Exception: ``error`` itself, if it was not raised in such a model.
    """
    if _MODELS not in _modules_of(error):
        raise error
    message = f"malformed body: {type(error).__name__}: {error}"
    return JSONResponse(error_content(400, message), status_code=400)


def _modules_of(error: Exception) -> Iterator[str]:
    """Yield the modules in the traceback of ``error``."""
    trace = error.__traceback__
    while trace is not None:
        yield str(trace.tb_frame.f_globals.get("__name__"))
        trace = trace.tb_next
