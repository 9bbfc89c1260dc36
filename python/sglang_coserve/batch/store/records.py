"""Records as JSON, as the store keeps them.

A field of a record needs no column. A field that is missing in the JSON, because an earlier version
wrote it, has its default; a field that only a later version knows is ignored.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from sglang_coserve.lines.result_record import decode_json, encode_json

_T = TypeVar("_T")


def encode(record: Any) -> str:
    """Return a record as JSON."""
    return encode_json(msgspec.to_builtins(record)).decode()


def decode(text: str, kind: type[_T]) -> _T:
    """Return the record of this ``kind`` in ``text``.

    Raises:
        msgspec.ValidationError: a field is missing that has no default, or is of another type.
    """
    return decode_json(text.encode(), kind)
