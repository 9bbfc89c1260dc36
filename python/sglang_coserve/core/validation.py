"""Checks values by their types, with errors that name the file, and the field or setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Final, TypeVar, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from sglang_coserve.errors import ConfigError, InputFileError

T = TypeVar("T")

STRICT: Final = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
"""No coercion: strings and booleans are not accepted as numbers, and NaN is refused."""


class JsonDocument(BaseModel):
    """Base class for a JSON object with the declared fields; other fields are ignored."""

    model_config = STRICT


def read_json(kind: type[T], text: str | bytes, source: str) -> T:
    """Parse a JSON text into a value of type ``kind``.

    Raises:
        InputFileError: the text is invalid; the message is ``source: path.to.field: problem``.
    """
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        raise InputFileError(f"{source}: {explain(error)}") from error


def check_ranges(settings: object, label: Callable[[str], str]) -> None:
    """Check the fields of a dataclass whose types have a range: those that are ``Annotated``.

    Raises:
        ConfigError: a value is out of its range; the message begins with the field's ``label``.
    """
    kind: Any = type(settings)
    for name, adapter in _ranges(kind).items():
        try:
            adapter.validate_python(getattr(settings, name))
        except ValidationError as error:
            raise ConfigError(f"{label(name)} {explain(error)}") from error


@cache
def _ranges(settings: type) -> Mapping[str, TypeAdapter[Any]]:
    return {
        name: TypeAdapter(kind, config=STRICT)
        for name, kind in get_type_hints(settings, include_extras=True).items()
        if get_origin(kind) is Annotated
    }


def explain(error: ValidationError) -> str:
    """Return the place and the description of the first error."""
    fault = error.errors(include_url=False)[0]
    found = "null" if fault["input"] is None else f"{fault['input']!r:.40}"
    match fault["type"]:
        case "json_invalid":
            return f"not valid JSON: {fault['ctx']['error']}"
        case "missing":
            problem = "this field is missing"
        case "value_error":
            problem = str(fault["ctx"]["error"])
        case "unexpected_keyword_argument":
            problem = "there is no such field"
        case _:
            problem = f"{fault['msg'].replace('Input should', 'must')}, found {found}"
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in fault["loc"])
    return f"{path.removeprefix('.')}: {problem}" if path else problem
