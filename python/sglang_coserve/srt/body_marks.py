"""The marks of an OpenAI body, moved to where SGLang passes them on.

SGLang drops ``service_tier`` and keys it does not know from chat and completion
bodies, but keeps ``custom_params``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import orjson

from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import RequestError, UnknownClassError
from sglang_coserve.srt.request_marks import CLASS_KEY, MARK_PREFIX

__all__ = ["SERVICE_TIER", "SERVICE_TIERS", "MarkedBody", "class_of_body", "move_marks"]

SERVICE_TIER = "service_tier"

SERVICE_TIERS = {
    "auto": RequestClass.ONLINE,
    "default": RequestClass.ONLINE,
    "priority": RequestClass.ONLINE,
    "scale": RequestClass.ONLINE,
    "flex": RequestClass.OFFLINE,
}
"""The class behind each value of OpenAI's ``service_tier``."""

_TIER_USED = {RequestClass.ONLINE: "default", RequestClass.OFFLINE: "flex"}


@dataclass(frozen=True, slots=True)
class MarkedBody:
    """A body as SGLang is to see it."""

    content: bytes
    tier_used: str | None
    """The ``service_tier`` to report; None when the body names no class."""


def move_marks(content: bytes) -> MarkedBody | None:
    """Move the marks of a JSON body into its ``custom_params``; None when it has none.

    Only what the body says about the class is checked, since the tier used is
    reported: the rest is checked where requests from every door pass.

    Raises:
        RequestError: a mark names no class, or two contradict each other.
    """
    try:
        # As the route does: what it takes for malformed, it is to answer in its own words.
        fields = orjson.loads(content)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    request_class = class_of_body(fields)
    marks = {
        key: value
        for key, value in fields.items()
        if key.startswith(MARK_PREFIX) and value is not None
    }
    if request_class is None and not marks:
        return None
    custom_params = fields.get("custom_params")
    if custom_params is not None and not isinstance(custom_params, dict):
        return None  # Malformed as well.
    moved = dict(custom_params or {})
    if request_class is not None:
        moved[CLASS_KEY] = marks[CLASS_KEY] = request_class.value
    for key, value in marks.items():
        if moved.get(key) is not None and moved[key] != value:
            raise RequestError(
                f"contradicting values of {key}: {value!r}, and {moved[key]!r} in custom_params"
            )
        moved[key] = value
    kept = {
        key: value
        for key, value in fields.items()
        if key != SERVICE_TIER and not key.startswith(MARK_PREFIX)
    }
    tier_used = None if request_class is None else _TIER_USED[request_class]
    return MarkedBody(_dumped({**kept, "custom_params": moved}), tier_used)


def _dumped(fields: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError:
        # It reads 1,024 levels of nesting, and writes 254.
        try:
            return json.dumps(fields).encode()
        except RecursionError:
            raise RequestError("the body is too deeply nested") from None


def class_of_body(body: dict[str, Any]) -> RequestClass | None:
    """Return the class an OpenAI body asks for; None when it says nothing.

    Raises:
        UnknownClassError: a mark names no class, or two marks disagree.
    """
    asked: dict[str, RequestClass] = {}
    if body.get(SERVICE_TIER) is not None:
        asked[SERVICE_TIER] = _class_of_tier(body[SERVICE_TIER])
    if body.get(CLASS_KEY) is not None:
        asked[CLASS_KEY] = RequestClass.parse(body[CLASS_KEY])
    custom_params = body.get("custom_params")
    if isinstance(custom_params, dict) and custom_params.get(CLASS_KEY) is not None:
        asked["custom_params"] = RequestClass.parse(custom_params[CLASS_KEY])
    # "auto" leaves the choice to the server, so it yields to any other mark.
    if body.get(SERVICE_TIER) == "auto" and len(asked) > 1:
        del asked[SERVICE_TIER]
    if len(set(asked.values())) > 1:
        said = ", ".join(f"{name} says {value.value}" for name, value in asked.items())
        raise UnknownClassError(f"contradicting request classes: {said}")
    return next(iter(asked.values()), None)


def _class_of_tier(tier: object) -> RequestClass:
    if not isinstance(tier, str) or tier not in SERVICE_TIERS:
        valid = ", ".join(repr(name) for name in SERVICE_TIERS)
        raise UnknownClassError(f"unknown service_tier {tier!r}: use one of {valid}")
    return SERVICE_TIERS[tier]
