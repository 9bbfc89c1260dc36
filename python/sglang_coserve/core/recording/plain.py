"""Frozen values as plain JSON values, and back, by the types of their fields.

Dataclasses become objects; named tuples and collections lists; mappings lists of pairs,
as a key may be ``None``; packed tokens lists of ids. Infinity, which JSON does not have,
becomes ``"inf"``. Floats keep every bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from sglang_coserve.core.offline_queue import PackedTokens, pack_tokens, unpack_tokens
from sglang_coserve.errors import CoserveError

__all__ = ["from_plain", "read_dataclass", "to_plain"]

T = TypeVar("T")

_INFINITE: Final = {str(value): value for value in (math.inf, -math.inf)}


def to_plain(value: Any) -> Any:
    """Return ``value`` as ``json.dumps`` takes it and ``from_plain`` reads it."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return unpack_tokens(PackedTokens(value)).tolist()
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return [[to_plain(key), to_plain(item)] for key, item in value.items()]
    return [to_plain(item) for item in value]


def from_plain(kind: Any, value: object) -> Any:
    """Return the value of type ``kind`` that ``to_plain`` made ``value`` from.

    Raises:
        ValueError: there is none; the message starts with the path to what is wrong.
    """
    if kind is float:
        return _read_float(value)
    if kind in (int, str, bool):
        if type(value) is not kind:
            raise _expected(kind.__name__, value)
        return value
    if kind is PackedTokens:
        return _made(pack_tokens, _read_items(int, value))
    if isinstance(kind, tuple):
        return _read_tuple(kind, value)
    if get_origin(kind) is not None:
        return _read_generic(get_origin(kind), get_args(kind), value)
    if issubclass(kind, Enum):
        if value not in [member.value for member in kind]:
            raise _expected(" or ".join(repr(member.value) for member in kind), value)
        return kind(value)
    if is_dataclass(kind):
        return read_dataclass(kind, value)
    return kind(*_read_tuple(tuple(_hints(kind).values()), value))


def read_dataclass(kind: Any, value: object, **known: Any) -> Any:
    """Return the dataclass ``kind`` with the fields in ``value`` and those that are ``known``.

    Raises:
        ValueError: as ``from_plain``.
    """
    given = _read_fields(kind, value) | known
    for field in fields(kind):
        if field.name not in given and field.default is field.default_factory is MISSING:
            raise ValueError(f".{field.name}: this field is missing")
    return _made(kind, **given)


def _read_fields(kind: type, value: object) -> dict[str, Any]:
    """Return those fields of the dataclass ``kind`` that are in ``value``.

    Raises:
        ValueError: as ``from_plain``; also for a field that ``kind`` does not have.
    """
    if not isinstance(value, dict):
        raise _expected("an object", value)
    hints = _hints(kind)
    given = {}
    for name, item in value.items():
        if name not in hints:
            raise ValueError(f".{name}: there is no such field")
        given[name] = _read_below(f".{name}", hints[name], item)
    return given


def _read_generic(origin: Any, arguments: tuple[Any, ...], value: object) -> Any:
    if origin is UnionType:
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return None if value is None else from_plain(kind, value)
    if origin is Mapping:
        return dict(_read_items(arguments, value))
    return origin(_read_items(arguments[0], value))


def _made(make: Callable[..., T], *arguments: Any, **named: Any) -> T:
    try:
        return make(*arguments, **named)
    except CoserveError as error:
        raise ValueError(f": {error}") from error


def _read_items(kind: Any, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _expected("a list", value)
    if kind is int and all(type(item) is int for item in value):
        return value  # Most of a recording: not worth a call for each.
    return [_read_below(f"[{i}]", kind, item) for i, item in enumerate(value)]


def _read_tuple(kinds: tuple[Any, ...], value: object) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != len(kinds):
        raise _expected(f"a list of {len(kinds)}", value)
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(_read_below(f"[{i}]", kind, item) for i, (kind, item) in pairs)


def _read_float(value: object) -> float:
    if isinstance(value, str) and value in _INFINITE:
        return _INFINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _expected("a number", value)
    try:
        return float(value)
    except OverflowError:
        raise _expected("a number that fits a float", value) from None


def _read_below(step: str, kind: Any, value: object) -> Any:
    try:
        return from_plain(kind, value)
    except ValueError as error:
        raise ValueError(f"{step}{error}") from None


def _expected(what: str, value: object) -> ValueError:
    return ValueError(f": expected {what}, found {value!r:.40}")


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)
