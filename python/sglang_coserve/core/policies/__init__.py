"""The scheduling policies."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

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

POLICIES: Final[Mapping[str, Callable[..., Policy]]] = MappingProxyType(
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

_SHARED_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        CoservePolicy.name: ("utility_ratio",),
        HygenPolicy.name: ("utility_ratio", "step_prefill_tokens"),
        BrosPolicy.name: ("base_batch_requests",),
        OocoPolicy.name: ("random_picks",),
    }
)
"""Settings of each policy that a ``SchedulerConfig`` can override."""


def make_policy(name: str, config: SchedulerConfig | None = None) -> Policy:
    """Return a new policy with its default settings, overridden by those set in ``config``.

    Raises:
        ConfigError: no policy has this name.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown scheduling policy {name!r}: use one of {', '.join(POLICIES)}")
    values = {key: getattr(config, key, None) for key in _SHARED_SETTINGS.get(name, ())}
    return POLICIES[name](**{key: value for key, value in values.items() if value is not None})
