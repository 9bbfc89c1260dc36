"""Validates bodies such that validation stops at the first invalid item of a list.

Pydantic reports every invalid item, for every alternative of a union: a body of 1 MiB can have
three million errors, and the event loop is blocked for half a minute while they are collected.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, SchemaValidator

__all__ = ["FailFast", "install_fail_fast"]

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
