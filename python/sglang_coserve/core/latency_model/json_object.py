"""Typed access to a parsed JSON object, with errors that name the file and the field."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from sglang_coserve.errors import CoserveError, InputFileError

__all__ = ["JsonObject"]


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object and where it stands.

    Every accessor raises ``error`` when the field is missing or malformed; the
    message is ``source: path.to.field: what is wrong``.
    """

    fields: Mapping[str, object]
    source: str
    """The file, for messages."""

    path: str = ""
    error: type[CoserveError] = InputFileError

    @classmethod
    def parse(cls, text: str, source: str) -> JsonObject:
        """Parse a JSON text that must be an object."""

        def reject(constant: str) -> NoReturn:
            raise ValueError(f"{constant} is not JSON")

        try:
            value = json.loads(text, parse_constant=reject)
        except (ValueError, RecursionError) as problem:
            raise InputFileError(f"{source}: not valid JSON: {problem}") from problem
        if not isinstance(value, dict):
            raise InputFileError(f"{source}: expected a JSON object, found {_name(value)}")
        return cls(value, source)

    def child(self, name: str) -> JsonObject:
        """Return the object in this field."""
        value = self._get(name)
        if not isinstance(value, dict):
            self.fail(name, f"expected an object, found {_name(value)}")
        return JsonObject(value, self.source, self._path(name), self.error)

    def text(self, name: str) -> str:
        """Return the string in this field."""
        value = self._get(name)
        if not isinstance(value, str):
            self.fail(name, f"expected a string, found {_name(value)}")
        return value

    def number(self, name: str, *, minimum: float | None = None) -> float:
        """Return the number in this field as a finite float."""
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(name, f"expected a number, found {_name(value)}")
        # A JSON number may be larger than any float.
        if not abs(value) <= sys.float_info.max:
            self.fail(name, f"must be a finite number, found {_name(value)}")
        return float(self._at_least(name, value, minimum))

    def integer(self, name: str, *, minimum: int | None = None) -> int:
        """Return the integer in this field."""
        return self._integer(name, self._get(name), minimum)

    def integers(self, name: str, *, minimum: int | None = None) -> tuple[int, ...]:
        """Return the list of integers in this field."""
        value = self._get(name)
        if not isinstance(value, list):
            self.fail(name, f"expected a list of integers, found {_name(value)}")
        return tuple(
            self._integer(f"{name}[{index}]", item, minimum) for index, item in enumerate(value)
        )

    def has(self, name: str) -> bool:
        """Tell whether this field holds anything but null."""
        return self.fields.get(name) is not None

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raise ``error`` about this field."""
        raise self.error(f"{self.source}: {self._path(name)}: {problem}")

    def _get(self, name: str) -> object:
        if name not in self.fields:
            self.fail(name, "this field is missing")
        return self.fields[name]

    def _path(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def _integer(self, name: str, value: object, minimum: int | None) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(name, f"expected an integer, found {_name(value)}")
        self._at_least(name, value, minimum)
        return value

    def _at_least(self, name: str, value: float, minimum: float | None) -> float:
        if minimum is not None and not value >= minimum:
            self.fail(name, f"must be at least {minimum}, found {value}")
        return value


def _name(value: object) -> str:
    return "null" if value is None else f"{value!r:.40}"
