"""Reads the class, tenant, targets and deadline of a request from a gateway's headers.

The headers are those of llm-d and of the Gateway API's inference extension, which name an
*objective* defined by the operator. A gateway is trusted more than its clients, so headers
override the body.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final

from sglang_coserve.asgi import bearer_key
from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import RequestError
from sglang_coserve.srt.marks.request_marks import CLASS_KEY, TPOT_KEY, TTFT_KEY, TTL_KEY

__all__ = ["HeaderMarks", "marks_of_headers", "tenant_of_key"]

_OBJECTIVE: Final = b"x-llm-d-inference-objective"
_TENANT: Final = b"x-llm-d-inference-fairness-id"
_TARGETS: Final = MappingProxyType(
    {
        b"x-slo-ttft-ms": TTFT_KEY,  # Of earlier versions; the newer name comes after it and wins.
        b"x-slo-tpot-ms": TPOT_KEY,
        b"x-llm-d-slo-ttft-ms": TTFT_KEY,
        b"x-llm-d-slo-tpot-ms": TPOT_KEY,
    }
)
_TTL: Final = b"x-llm-d-inference-ttl"
_DURATION: Final = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:h|ms|us|µs|ns|m|s)", re.ASCII)
_UNITS_S: Final = MappingProxyType(
    {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
)
_MOST_TTL_BYTES: Final = 64
_MOST_TENANT_BYTES: Final = 256
_KEY_HEADERS: Final = (b"authorization", b"x-api-key")


@dataclass(frozen=True, slots=True)
class HeaderMarks:
    """The marks and the tenant found in the headers, if any."""

    marks: dict[str, Any] = field(default_factory=dict)
    tenant: str | None = None


def marks_of_headers(
    headers: Iterable[tuple[bytes, bytes]], offline_objectives: frozenset[str]
) -> HeaderMarks:
    """Return the marks in the headers of a request. O(headers).

    Args:
        headers: Names in lower case, and values.
        offline_objectives: The objectives whose requests are offline; any other is online.

    Raises:
        RequestError: a target is not a number, the time to live is not a duration, or the
            tenant's name is too long.
    """
    found = {name: value for name, value in headers if name.startswith(b"x-")}
    marks: dict[str, Any] = {}
    if objective := found.get(_OBJECTIVE, b"").decode("latin-1").strip():
        is_offline = objective in offline_objectives
        marks[CLASS_KEY] = (RequestClass.OFFLINE if is_offline else RequestClass.ONLINE).value
    for name, key in _TARGETS.items():
        if name in found:
            marks[key] = _number(name, found[name])
    if _TTL in found:
        marks[TTL_KEY] = _duration_s(found[_TTL])
    tenant = found.get(_TENANT, b"")
    if len(tenant) > _MOST_TENANT_BYTES:
        raise RequestError(
            f"{_TENANT.decode()} has {len(tenant)} bytes: use at most {_MOST_TENANT_BYTES}"
        )
    return HeaderMarks(marks, tenant.decode("latin-1").strip() or None)


def tenant_of_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return a hash of a request's API key as tenant; None without a key.

    Raises:
        RequestError: it has several keys.
    """
    headers = list(headers)
    key = bearer_key(headers)
    if key is not None:
        return _tenant(key.encode("latin-1"))
    for name, value in headers:
        if name.lower() in _KEY_HEADERS and value:
            return _tenant(value)
    return None


def _tenant(key: bytes) -> str:
    return f"key {blake2b(key, digest_size=8).hexdigest()}"


def _number(name: bytes, value: bytes) -> float:
    try:
        return float(value)
    except ValueError:
        text = value.decode("latin-1")
        raise RequestError(f"{name.decode()} is {text!r}: use a number of milliseconds") from None


def _duration_s(value: bytes) -> float:
    """Return a duration as llm-d's router reads it (Go's ``time.ParseDuration``), above 0."""
    text = value.decode("utf-8", errors="replace").strip()
    parts = _DURATION.findall(text) if len(value) <= _MOST_TTL_BYTES else []
    seconds = sum(float(part.rstrip("hmsuµn")) * _UNITS_S[_unit(part)] for part in parts)
    if "".join(parts) != text or not 0 < seconds < math.inf:
        raise RequestError(
            f"{_TTL.decode()} is {text[:_MOST_TTL_BYTES]!r}: use a duration above 0 such as 90s, "
            "1m30s or 1500ms"
        )
    return seconds


def _unit(part: str) -> str:
    return part.lstrip("0123456789.")
