"""Which engine of a fleet gets which online request: the policies of routers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

from sglang_coserve.errors import ConfigError

__all__ = ["ROUTER_POLICIES", "OnlineRouter"]

ROUTER_POLICIES: Final = ("round_robin", "random", "power_of_two", "least_load")


class OnlineRouter:
    """Sends each online request to one of the engines that are open."""

    def __init__(self, policy: str, seed: int = 0) -> None:
        """``policy`` is one of ``ROUTER_POLICIES``.

        Raises:
            ConfigError: it is not.
        """
        if policy not in ROUTER_POLICIES:
            raise ConfigError(f"router {policy!r}: use one of {', '.join(ROUTER_POLICIES)}")
        self._policy = policy
        self._rng = random.Random(seed)
        self._num_sent = 0

    def choose(self, engines: Sequence[int], load: Callable[[int], int]) -> int:
        """Return one of ``engines``; ``load`` says how many online requests one has."""
        assert engines
        self._num_sent += 1
        match self._policy:
            case "round_robin":
                return engines[self._num_sent % len(engines)]
            case "random":
                return self._rng.choice(engines)
            case "power_of_two":
                return min(self._rng.choices(engines, k=2), key=load)
            case _:
                return min(engines, key=load)
