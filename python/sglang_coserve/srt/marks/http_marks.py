"""Reads the class, targets and deadline of an HTTP request, on any route.

They come in the JSON body, or in a gateway's headers: those of llm-d and of the Gateway API's
inference extension, which name an *objective* defined by the operator. A gateway is trusted more
than its clients, so headers override the body.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import RequestError
from sglang_coserve.srt.marks.request_marks import CLASS_KEY, MARK_PREFIX, GatewayHints

SERVICE_TIER: Final = "service_tier"

SERVICE_TIERS: Final[Mapping[str, RequestClass]] = MappingProxyType(
    {
        **dict.fromkeys(("auto", "default", "priority", "scale", "fast"), RequestClass.ONLINE),
        "standard_only": RequestClass.ONLINE,  # Anthropic's.
        "flex": RequestClass.OFFLINE,
    }
)
"""The class behind each value of ``service_tier``, of the newest ``openai`` client and before."""


def tier_used(request_class: RequestClass) -> str:
    """Return the ``service_tier`` that an answer names."""
    return "flex" if request_class is RequestClass.OFFLINE else "default"


def marks_of_body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the marks at the top level of a JSON body, including its class if it names one.

    Only the class is checked here; the other marks are checked in the tokenizer manager, which
    all entry points share.

    Raises:
        RequestError: a mark names no class, or two marks disagree.
    """
    marks = {
        key: value
        for key, value in fields.items()
        if key.startswith(MARK_PREFIX) and value is not None
    }
    request_class = class_of_body(fields)
    if request_class is not None:
        marks[CLASS_KEY] = request_class.value
    return marks


def class_of_body(body: Mapping[str, Any]) -> RequestClass | None:
    """Return the class that a body asks for; None if it names none.

    Raises:
        RequestError: a mark names no class, or two marks disagree.
    """
    asked: dict[str, RequestClass] = {}
    if body.get(SERVICE_TIER) is not None:
        asked[SERVICE_TIER] = _class_of_tier(body[SERVICE_TIER])
    if body.get(CLASS_KEY) is not None:
        asked[CLASS_KEY] = RequestClass.parse(body[CLASS_KEY])
    # Those of ``/generate`` are inside of its sampling parameters.
    for name, fields in (("body", body), ("sampling_params", body.get("sampling_params"))):
        custom_params = fields.get("custom_params") if isinstance(fields, Mapping) else None
        if isinstance(custom_params, dict) and custom_params.get(CLASS_KEY) is not None:
            asked[f"custom_params of {name}"] = RequestClass.parse(custom_params[CLASS_KEY])
    # "auto" leaves the choice to the server, so it yields to any other mark.
    if body.get(SERVICE_TIER) == "auto" and len(asked) > 1:
        del asked[SERVICE_TIER]
    if len(set(asked.values())) > 1:
        said = ", ".join(f"{name} says {value.value}" for name, value in asked.items())
        raise RequestError(f"contradicting request classes: {said}")
    return next(iter(asked.values()), None)


_SMG_PRIORITY: Final = b"x-smg-priority"
_DYNAMO_PRIORITY: Final = b"x-dynamo-request-priority"


def is_bulk(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether SGLang's router says so."""
    return dict(headers).get(_SMG_PRIORITY, b"").strip().lower() == b"bulk"


def priority_in(
    headers: Iterable[tuple[bytes, bytes]], body: Mapping[str, Any]
) -> tuple[float | None, bool]:
    """Return the priority of a request, and whether a header says it.

    Dynamo's header comes before its hint, and the hint before SGLang's own field. None without any;
    what is no number in a body is none, since the route refuses it.

    Raises:
        RequestError: the header is no number.
    """
    if (value := dict(headers).get(_DYNAMO_PRIORITY)) is not None:
        try:
            priority = float(value)
        except ValueError:
            priority = math.nan
        if math.isnan(priority):
            text = value.decode("latin-1")[:64]
            raise RequestError(f"{_DYNAMO_PRIORITY.decode()} is {text!r}: use a number")
        return priority, True
    nvext = body.get("nvext")
    hints = nvext.get("agent_hints") if isinstance(nvext, Mapping) else None
    for fields in (hints, body):
        found = fields.get("priority") if isinstance(fields, Mapping) else None
        if type(found) in (int, float):
            return found, False
    return None, False


def _class_of_tier(tier: object) -> RequestClass:
    if not isinstance(tier, str) or tier not in SERVICE_TIERS:
        valid = ", ".join(repr(name) for name in SERVICE_TIERS)
        raise RequestError(f"unknown service_tier {tier!r}: use one of {valid}")
    return SERVICE_TIERS[tier]


# Headers by rank: llm-d's, llm-d's older name, the header of SGLang's router. The first counts.
_OBJECTIVE: Final = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
_TTL: Final = (b"x-llm-d-inference-ttl", b"x-gateway-inference-ttl")
_TTFT: Final = (b"x-llm-d-slo-ttft-ms", b"x-slo-ttft-ms", b"x-sgl-ttft-slo-ms")
_TPOT: Final = (b"x-llm-d-slo-tpot-ms", b"x-slo-tpot-ms")
_TOKENS_PER_S: Final = (b"x-sgl-tps-slo",)
_DURATION: Final = re.compile(r"(\d+\.?\d*|\.\d+)(h|ms|us|µs|ns|m|s)", re.ASCII)
_UNITS_S: Final = MappingProxyType(
    {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
)
_MOST_TTL_BYTES: Final = 64


def marks_of_headers(headers: Iterable[tuple[bytes, bytes]]) -> GatewayHints:
    """Return what the headers of a request say; their names are in lower case. O(headers).

    Raises:
        RequestError: a target is not a number, or the time to live is not a duration.
    """
    found = {name: value for name, value in headers if name.startswith(b"x-")}
    if not found:
        return GatewayHints()
    _, objective = _first(found, _OBJECTIVE)
    name, ttl = _first(found, _TTL)
    hints = GatewayHints(
        objective=objective.decode("latin-1").strip() or None,
        ttft_ms=_number(found, _TTFT, "of milliseconds"),
        tpot_ms=_number(found, _TPOT, "of milliseconds"),
        ttl_s=_duration_s(name, ttl) if name else None,
    )
    rate = _number(found, _TOKENS_PER_S, "of tokens per second")
    if rate and hints.tpot_ms is None:
        hints = replace(hints, tpot_ms=1e3 / rate)
    return hints


def _first(found: Mapping[bytes, bytes], names: Iterable[bytes]) -> tuple[str, bytes]:
    """Return name and value of the first of ``names`` that is there; empty without any."""
    return next(((name.decode(), found[name]) for name in names if name in found), ("", b""))


def _number(found: Mapping[bytes, bytes], names: Iterable[bytes], unit: str) -> float | None:
    """Return the number in the first of ``names`` that is there, not below 0; None without any."""
    name, value = _first(found, names)
    if not name:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    # In a header of SGLang's, zero is a mistake; llm-d's batches send it when their time is up.
    if not 0 <= number < math.inf or (number == 0 and name.startswith("x-sgl-")):
        text = value.decode("latin-1")
        raise RequestError(f"{name} is {text[:64]!r}: use a number {unit}, not below 0")
    return number


def _duration_s(name: str, value: bytes) -> float:
    """Return a duration as llm-d's router reads it (Go's ``time.ParseDuration``), above 0.

    Raises:
        RequestError: it is none; ``name`` says of what.
    """
    text = value.decode("utf-8", errors="replace").strip()
    parts = _DURATION.findall(text) if len(value) <= _MOST_TTL_BYTES else []
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if "".join(map("".join, parts)) != text or not 0 < seconds < math.inf:
        raise RequestError(
            f"{name} is {text[:_MOST_TTL_BYTES]!r}: use a duration above 0 such as 90s, 1m30s or"
            " 1500ms"
        )
    return seconds
