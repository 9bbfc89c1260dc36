"""How a request's class travels through SGLang.

``sampling_params.custom_params`` is the one field that reaches the scheduler's
``Req`` unchanged from every door: ``Engine``, ``/generate``, ``/v1/completions``
and ``/v1/chat/completions``.
"""

from __future__ import annotations

from typing import Any

from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import UnknownClassError

__all__ = [
    "CLASS_KEY",
    "SERVICE_TIERS",
    "is_offline",
    "parse_custom_params",
    "parse_service_tier",
    "tier_used",
]

CLASS_KEY = "coserve_class"
"""The key of ``custom_params``, and of an OpenAI body, that names a request's class."""

SERVICE_TIERS = {
    "auto": RequestClass.ONLINE,
    "default": RequestClass.ONLINE,
    "priority": RequestClass.ONLINE,
    "scale": RequestClass.ONLINE,
    "flex": RequestClass.OFFLINE,
}
"""The class behind each value of OpenAI's ``service_tier``."""

_TIER_USED = {RequestClass.ONLINE: "default", RequestClass.OFFLINE: "flex"}


def parse_service_tier(tier: object) -> RequestClass:
    """Return the class that an OpenAI ``service_tier`` asks for.

    Raises:
        UnknownClassError: it is none of ``SERVICE_TIERS``.
    """
    if not isinstance(tier, str) or tier not in SERVICE_TIERS:
        valid = ", ".join(repr(name) for name in SERVICE_TIERS)
        raise UnknownClassError(f"unknown service_tier {tier!r}: use one of {valid}")
    return SERVICE_TIERS[tier]


def tier_used(request_class: RequestClass) -> str:
    """Return the ``service_tier`` a response reports for ``request_class``."""
    return _TIER_USED[request_class]


def parse_custom_params(custom_params: object) -> RequestClass:
    """Return the class named in ``custom_params``; without a mark it is online.

    Raises:
        UnknownClassError: the mark names no class.
    """
    if not isinstance(custom_params, dict) or CLASS_KEY not in custom_params:
        return RequestClass.ONLINE
    return RequestClass.parse(custom_params[CLASS_KEY])


def is_offline(req: Any) -> bool:
    """True when SGLang's ``Req`` is offline. Its class was validated on arrival."""
    custom_params = req.sampling_params.custom_params
    return (
        isinstance(custom_params, dict)
        and custom_params.get(CLASS_KEY) == RequestClass.OFFLINE.value
    )
