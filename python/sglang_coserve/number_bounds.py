"""Bounds of the numbers that clients give, and the error for a number outside."""

from __future__ import annotations

from numbers import Real
from typing import NamedTuple

from sglang_coserve.errors import RequestError


class Bound(NamedTuple):
    """The values that a field may have, both ends included."""

    least: float
    most: float
    unit: str = ""
    is_whole: bool = False
    """Only whole numbers."""


def check_number(name: str, value: object, bound: Bound) -> None:
    """Check the value of the field ``name``, which must not be null.

    Raises:
        RequestError: it is no number, or out of bounds.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    is_within = is_number and bound.least <= value <= bound.most  # type: ignore[operator]
    if is_within and not (bound.is_whole and value % 1):  # type: ignore[operator]
        return
    number = "a whole number" if bound.is_whole else "a number"
    of = f" of {bound.unit}" if bound.unit else ""
    ends = f"{_told(bound.least)} to {_told(bound.most)}"
    raise RequestError(f"{name} is {excerpt(value)}: use {number}{of}, {ends}")


def excerpt(value: object) -> str:
    """Return the text of a value for an error message, in at most 41 characters."""
    # Python refuses to convert a huge integer to decimal digits.
    text = hex(value) if isinstance(value, int) and abs(value) > 2**70 else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _told(end: float) -> str:
    return str(end) if isinstance(end, int) else f"{end:g}"
