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
from sglang_coserve.core.scheduler_config import SchedulerConfig
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


def make_policy(name: str, config: SchedulerConfig | None = None) -> Policy:
    """Return a new policy with its default settings, overridden by those of the same names that
    ``config`` sets.

    Raises:
        ConfigError: no policy has this name.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown scheduling policy {name!r}: use one of {', '.join(POLICIES)}")
    values = {field.name: getattr(config, field.name, None) for field in fields(POLICIES[name])}
    given = {key: value for key, value in values.items() if value is not None}
    policy: Policy = POLICIES[name](**given)
    return policy
