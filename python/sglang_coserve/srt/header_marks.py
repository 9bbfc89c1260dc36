"""What a gateway says of a request in headers: class, tenant and own targets.

They are those of llm-d and of the Gateway API's inference extension, which name an
*objective* of the operator's. A gateway stands before its clients, so headers win over
what a body says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import RequestError
from sglang_coserve.srt.request_marks import CLASS_KEY, TPOT_KEY, TTFT_KEY

__all__ = ["HeaderMarks", "marks_of_headers"]

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
_MOST_TENANT_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class HeaderMarks:
    """What the headers say; nothing if there are none of these."""

    marks: dict[str, Any] = field(default_factory=dict)
    tenant: str | None = None


def marks_of_headers(
    headers: Iterable[tuple[bytes, bytes]], offline_objectives: frozenset[str]
) -> HeaderMarks:
    """Return what the headers of a request say. O(headers).

    Args:
        headers: Names in lower case, and values.
        offline_objectives: The objectives whose requests are offline; any other is online.

    Raises:
        RequestError: a target is not a number, or the tenant's name is too long.
    """
    found = {name: value for name, value in headers if name.startswith(b"x-")}
    marks: dict[str, Any] = {}
    if objective := found.get(_OBJECTIVE, b"").decode("latin-1").strip():
        is_offline = objective in offline_objectives
        marks[CLASS_KEY] = (RequestClass.OFFLINE if is_offline else RequestClass.ONLINE).value
    for name, key in _TARGETS.items():
        if name in found:
            marks[key] = _number(name, found[name])
    tenant = found.get(_TENANT, b"")
    if len(tenant) > _MOST_TENANT_BYTES:
        raise RequestError(
            f"{_TENANT.decode()} has {len(tenant)} bytes: use at most {_MOST_TENANT_BYTES}"
        )
    return HeaderMarks(marks, tenant.decode("latin-1").strip() or None)


def _number(name: bytes, value: bytes) -> float:
    try:
        return float(value)
    except ValueError:
        text = value.decode("latin-1")
        raise RequestError(f"{name.decode()} is {text!r}: use a number of milliseconds") from None
