"""Lines of a batch file, and their bodies."""

from __future__ import annotations

from typing import Any, Final

import orjson

__all__ = ["CHAT", "COMPLETIONS", "batch_line", "completion_body"]

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"


def completion_body(prompt: str | list[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
    """Return the body of a greedy completion that does not end early."""
    fields = {"model": "default", "temperature": 0, "ignore_eos": True}
    return {**fields, "prompt": prompt, "max_tokens": max_tokens, **extra}


def batch_line(custom_id: str, body: dict[str, Any]) -> bytes:
    """Return a line of a batch file, with its end."""
    line = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
