"""JSON documents with declared fields, read with errors that name the file and the field."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from sglang_coserve.errors import InputFileError

T = TypeVar("T")


class JsonDocument(BaseModel):
    """Base class for a JSON object with the declared fields; other fields are ignored.

    Nothing is coerced: strings and booleans are not accepted as numbers, and NaN is refused.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


def read_json(kind: type[T], text: str | bytes, source: str) -> T:
    """Parse a JSON text into a value of type ``kind``.

    Raises:
        InputFileError: the text is invalid; the message is ``source: path.to.field: problem``.
    """
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        raise InputFileError(f"{source}: {explain(error)}") from error


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
