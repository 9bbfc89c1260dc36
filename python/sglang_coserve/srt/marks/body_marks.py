"""Reads the class, targets and tenant of a request from its JSON body, on any route."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import UnknownClassError
from sglang_coserve.srt.marks.request_marks import CLASS_KEY, MARK_PREFIX

__all__ = [
    "SERVICE_TIER",
    "SERVICE_TIERS",
    "class_of_body",
    "marks_of_body",
    "tenant_of_body",
    "tier_used",
]

SERVICE_TIER: Final = "service_tier"

SERVICE_TIERS: Final[Mapping[str, RequestClass]] = MappingProxyType(
    {
        **dict.fromkeys(("auto", "default", "priority", "scale", "fast"), RequestClass.ONLINE),
        "standard_only": RequestClass.ONLINE,  # Anthropic's.
        "flex": RequestClass.OFFLINE,
    }
)
"""The class behind each value of ``service_tier``, of the newest ``openai`` client and before."""


_MOST_TENANT_CHARS: Final = 256


def tier_used(request_class: RequestClass) -> str:
    """Return the ``service_tier`` that an answer names."""
    return "flex" if request_class is RequestClass.OFFLINE else "default"


def marks_of_body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the marks at the top level of a JSON body, including its class if it names one.

    Only the class is checked here; the other marks are checked in the tokenizer manager, which
    all entry points share.

    Raises:
        UnknownClassError: a mark names no class, or two marks disagree.
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


def tenant_of_body(fields: Mapping[str, Any]) -> str | None:
    """Return the tenant named in a body: OpenAI's ``user``, or Anthropic's
    ``metadata.user_id``."""
    metadata = fields.get("metadata")
    within = metadata.get("user_id") if isinstance(metadata, dict) else None
    for user in (fields.get("user"), within):
        if isinstance(user, str) and user:
            return user[:_MOST_TENANT_CHARS]
    return None


def class_of_body(body: Mapping[str, Any]) -> RequestClass | None:
    """Return the class that a body asks for; None if it names none.

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
