"""Ranges of numbers, as annotations of a dataclass's fields: ``Annotated[float, POSITIVE]``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, Final, NamedTuple, get_args, get_origin, get_type_hints

from sglang_coserve.errors import ConfigError


class Range(NamedTuple):
    """The finite numbers from ``least`` to ``most``."""

    least: float
    most: float = math.inf
    excludes_least: bool = False

    def fault(self, value: object, *, is_whole: bool) -> str | None:
        """Return what is wrong with a value; None if the value is a number of this range.

        ``is_whole``: whether the number must be an integer.
        """
        must = self._requirement(value, is_whole=is_whole)
        found = "null" if value is None else f"{value!r:.40}"
        return must and f"must be {must}, found {found}"

    def _requirement(self, value: object, *, is_whole: bool) -> str | None:
        """Return the first requirement that a value does not meet."""
        if not isinstance(value, int if is_whole else (int, float)) or isinstance(value, bool):
            return "a valid integer" if is_whole else "a valid number"
        if not is_whole and not _is_finite(value):
            return "a finite number"
        if self.excludes_least and value <= self.least:
            return f"greater than {self.least:g}"
        if value < self.least:
            return f"greater than or equal to {self.least:g}"
        if value > self.most:
            return f"less than or equal to {self.most:g}"
        return None


POSITIVE: Final = Range(0, excludes_least=True)
NOT_NEGATIVE: Final = Range(0)
SHARE: Final = Range(0, 1)


def check_ranges(values: object, label: Callable[[str], str]) -> None:
    """Check the fields of a dataclass that have a range.

    Integers count as numbers, booleans do not; a field may be ``None`` where its type says so.

    Raises:
        ConfigError: a value is out of its range; the message begins with the field's ``label``.
    """
    kind: Any = type(values)
    for name, field in _ranges(kind).items():
        value = getattr(values, name)
        if value is None and field.may_be_none:
            continue
        if fault := field.range.fault(value, is_whole=field.is_whole):
            raise ConfigError(f"{label(name)} {fault}")


class _Field(NamedTuple):
    range: Range
    is_whole: bool
    may_be_none: bool


@cache
def _ranges(kind: type) -> Mapping[str, _Field]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: _field(*get_args(hint))
        for name, hint in hints.items()
        if get_origin(hint) is Annotated
    }


def _field(kind: Any, bounds: Range) -> _Field:
    kinds = get_args(kind) or (kind,)
    return _Field(bounds, float not in kinds, NoneType in kinds)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # An integer beyond all floats.
        return False
