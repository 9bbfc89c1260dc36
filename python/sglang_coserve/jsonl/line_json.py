"""A line as JSON, and its ``custom_id``: the same for who sends lines and who orders them."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

__all__ = ["parse_line", "usable_id"]


def parse_line(content: bytes) -> Any:
    """Return the JSON value of a line.

    Raises:
        UnicodeDecodeError: the line is not UTF-8.
        ValueError: the line is not JSON; NaN and infinity are not.
    """
    content.decode()
    return from_json(content, allow_inf_nan=False)


def usable_id(fields: object) -> str | None:
    """Return the ``custom_id`` of a parsed line; None where it has none that names it."""
    custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
    return custom_id if isinstance(custom_id, str) and custom_id else None
