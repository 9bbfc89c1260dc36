"""Short texts about faults for clients. They quote neither bodies nor paths of the server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

_DIRECTORIES: Final = re.compile(r"(?<![\w/:])(?:/[\w.@+~-]+)+/(?=[\w.@+~-])")


def without_directories(text: str) -> str:
    """Return a message for clients: of absolute paths the last names alone."""
    return _DIRECTORIES.sub("", text)


_MOST_FAULTS: Final = 8
_MOST_CHARS: Final = 400
"""Longest text about one fault."""

_MOST_PLACE_CHARS: Final = 120
"""Longest place of a fault in a body: a place may be a key of the client's."""


def told_faults(faults: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """Return what is wrong with a body, and the field of the first fault; None without a field.

    ``faults`` are Pydantic's.
    """
    places = [_place(fault) for fault in faults[:_MOST_FAULTS]]
    told = [
        f"{place or 'body'}: {_reason(fault)}"[:_MOST_CHARS]
        for place, fault in zip(places, faults, strict=False)
    ]
    if more := len(faults) - len(told):
        told.append(f"and {more} more")
    return "; ".join(told), (places[0] or None) if places else None


def _place(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "json_invalid":
        return ""
    # The first part says where: body, query, path or header.
    parts = [str(part)[:_MOST_PLACE_CHARS] for part in fault["loc"][1:]]
    return ".".join(parts)[:_MOST_PLACE_CHARS]


def _reason(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "json_invalid":
        return f"no valid JSON: {fault['ctx']['error']}"
    return str(fault["msg"])
