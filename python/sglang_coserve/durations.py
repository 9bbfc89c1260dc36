"""Durations such as completion windows, as people write them."""

from __future__ import annotations

import re
from typing import Final

LONGEST_WINDOW_S: Final = 366 * 86_400.0
"""The longest window of a batch."""

UNITS_S: Final = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_PART: Final = re.compile(r"([0-9]{1,9})([dhms])")
_WHOLE: Final = re.compile(r"(?:[0-9]{1,9}[dhms])+")


def duration_s(text: str) -> float | None:
    """Return the seconds in ``24h``, ``90m``, ``1h30m`` or ``7d``; None if it is no duration."""
    if _WHOLE.fullmatch(text) is None:
        return None
    return float(sum(int(count) * UNITS_S[unit] for count, unit in _PART.findall(text)))
