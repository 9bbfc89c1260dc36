"""Determines the tenant of a request without a gateway's header."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, Final

__all__ = ["tenant_of_body", "tenant_of_key"]

_KEY_HEADERS: Final = (b"authorization", b"x-api-key")
_MOST_CHARS: Final = 256


def tenant_of_body(fields: Mapping[str, Any]) -> str | None:
    """Return the tenant named in a body: OpenAI's ``user``, or Anthropic's
    ``metadata.user_id``."""
    metadata = fields.get("metadata")
    within = metadata.get("user_id") if isinstance(metadata, dict) else None
    for user in (fields.get("user"), within):
        if isinstance(user, str) and user:
            return user[:_MOST_CHARS]
    return None


def tenant_of_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return a hash of a request's API key as tenant; None without a key."""
    for name, value in headers:
        if name.lower() in _KEY_HEADERS and value:
            return f"key {blake2b(value, digest_size=8).hexdigest()}"
    return None
