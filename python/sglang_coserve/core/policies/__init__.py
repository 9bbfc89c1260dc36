"""The scheduling policies."""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

from sglang_coserve.core.policies.baselines import (
    FcfsPolicy,
    NonPreemptivePolicy,
    OnlineOnlyPolicy,
    PriorityPolicy,
    SarathiPolicy,
)
from sglang_coserve.core.policies.bros import BrosPolicy
from sglang_coserve.core.policies.conserve import ConservePolicy
from sglang_coserve.core.policies.coserve import CoservePolicy
from sglang_coserve.core.policies.hygen import HygenPolicy
from sglang_coserve.core.policies.ooco import OocoPolicy
from sglang_coserve.core.policy import Policy
from sglang_coserve.errors import ConfigError

__all__ = ["POLICIES", "make_policy"]

POLICIES: Final[Mapping[str, type[Any]]] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            CoservePolicy,
            ConservePolicy,
            HygenPolicy,
            BrosPolicy,
            OocoPolicy,
            FcfsPolicy,
            PriorityPolicy,
            SarathiPolicy,
            NonPreemptivePolicy,
            OnlineOnlyPolicy,
        )
    }
)
"""All policies by name; the constructor arguments are their settings."""

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


def make_policy(name: str, settings: Mapping[str, Any] = _NONE) -> Policy:
    """Return a new policy.

    Args:
        name: A key of ``POLICIES``.
        settings: Constructor arguments; the others have their defaults.

    Raises:
        ConfigError: no policy has this name, the policy has no such setting, or a value is out of
            range.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown scheduling policy {name!r}: use one of {', '.join(POLICIES)}")
    known = [field.name for field in fields(POLICIES[name]) if field.init]
    if unknown := sorted(settings.keys() - set(known)):
        has = f"has only {', '.join(known)}" if known else "has no settings"
        raise ConfigError(f"policy {name}: {unknown[0]} is no setting of it: the policy {has}")
    policy: Policy = POLICIES[name](**settings)
    return policy
