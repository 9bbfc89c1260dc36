"""The ``Range`` header."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["byte_range"]

_RANGE: Final = re.compile(r"bytes=(\d{1,18})?-(\d{1,18})?", re.ASCII)


def byte_range(header: str, size_bytes: int) -> tuple[int, int] | None:
    """Return the bytes [start, end) that are asked for of ``size_bytes``.

    None for anything but one range, which RFC 9110 (14.2) lets a server ignore.
    ``start`` may be beyond the end.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or match[1] is match[2] is None:
        return None
    if match[1] is None:
        return max(0, size_bytes - int(match[2])), size_bytes
    start, end = int(match[1]), size_bytes
    if match[2] is not None:
        if int(match[2]) < start:
            return None
        end = min(int(match[2]) + 1, size_bytes)
    return start, end
