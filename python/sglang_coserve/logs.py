"""Logs of servers, as text or as JSON, and the id of the request that a record is about.

The id comes in ``x-request-id``, or is made here, and goes back with the answer. It is kept in a
context variable, so that all that is logged for a request in its process has it.
"""

from __future__ import annotations

import re
from typing import Any, Final

from asgi_correlation_id import CorrelationIdMiddleware
from pythonjsonlogger.json import JsonFormatter

LOG_FORMATS: Final = ("text", "json")

_ID: Final = re.compile(r"[!-~]{1,128}")
_FIELDS: Final = {
    "levelname": "level",
    "name": "logger",
    "process": "process",
    "message": "message",
    "correlation_id": "request_id",
}
_QUIET: Final = ("httpx", "httpcore", "httpx2", "httpcore2", "aiohttp.access")
"""Loggers that tell of every request that is made, also by libraries."""


class RequestIdMiddleware(CorrelationIdMiddleware):
    """Takes a request's id, or makes one; anything printable is an id, whoever made it."""

    def __init__(self, app: Any) -> None:
        super().__init__(app, validator=lambda value: _ID.fullmatch(value) is not None)


class _Formatter(JsonFormatter):
    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        """Leave out what is not known: the id, where no request is served."""
        return {name: value for name, value in log_data.items() if value is not None}


def json_formatter(**_formats: Any) -> JsonFormatter:
    """Return what writes a record as one line of JSON; formats of text are ignored."""
    return _Formatter(list(_FIELDS), rename_fields=dict(_FIELDS), timestamp="at")


def log_settings(log_format: str, level: str) -> dict[str, Any]:
    """Return what ``logging.config.dictConfig`` takes, which can also be written as JSON.

    Args:
        log_format: One of ``LOG_FORMATS``.
        level: The name of a level, in any case.
    """
    text = {
        "format": "%(asctime)s %(levelname)s [%(correlation_id)s] %(message)s",
        "datefmt": "%Y-%m-%d %H:%M:%S",
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {
            "request_id": {
                "()": "asgi_correlation_id.CorrelationIdFilter",
                "default_value": None if log_format == "json" else "-",
            }
        },
        "formatters": {
            "servers": {"()": f"{__name__}.json_formatter"} if log_format == "json" else text
        },
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "filters": ["request_id"],
                "formatter": "servers",
            }
        },
        "root": {"level": level.upper(), "handlers": ["stderr"]},
        "loggers": {name: {"level": "WARNING"} for name in _QUIET},
    }
