"""Durations as users write them."""

from __future__ import annotations

import math
import re
from typing import Final

from sglang_coserve.batch.errors import BatchRequestError

__all__ = ["window_s", "window_text"]

_UNITS_S: Final = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_PART = re.compile(r"([0-9]{1,9})([dhms])")
_WINDOW = re.compile(r"(?:[0-9]{1,9}[dhms])+")


def window_s(text: str, max_window_s: float) -> float:
    """Return the seconds in ``text``: ``24h``, ``90m``, ``1h30m``, ``7d``.

    Raises:
        BatchRequestError: it is no duration, or not in (0, ``max_window_s``].
    """
    if _WINDOW.fullmatch(text) is None:
        raise _error(f"completion_window {text[:32]!r} is no duration: use 24h, 90m, 1h30m or 7d")
    seconds = sum(int(count) * _UNITS_S[unit] for count, unit in _PART.findall(text))
    if not 0 < seconds <= max_window_s:
        raise _error(
            f"completion_window {text!r} must be more than 0 s and at most {max_window_s:g} s"
        )
    return float(seconds)


def window_text(seconds: float) -> str:
    """Return the shortest window of whole minutes, or of whole seconds below ten, that lasts
    so long."""
    whole_s = max(1, math.ceil(seconds))
    if whole_s >= 600:
        whole_s = math.ceil(whole_s / 60) * 60
    parts = []
    for unit, unit_s in _UNITS_S.items():
        count, whole_s = divmod(whole_s, unit_s)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def _error(message: str) -> BatchRequestError:
    return BatchRequestError(message, code="invalid_completion_window", param="completion_window")
