"""Says when a call to a server is given up: one rule for uploads, downloads and polls.

A pure decision: the clock and the random numbers are passed in.
"""

from __future__ import annotations

import random

from sglang_coserve.errors import ServerGoneError
from sglang_coserve.lines.retry import RetryPolicy, backoff_s

__all__ = ["Outage"]


class Outage:
    """How long a call has got nowhere, over all its attempts.

    A call gets further when a byte goes beyond those of every earlier attempt, up or down: that
    ends an outage. Bytes that an earlier attempt had carried, too, show only that the server is
    there: no time counts while they flow, but the outage is not over. So a slow transfer goes on
    however often it breaks, and one that always breaks at the same byte is given up. Nor does time
    count before the first failure: a call in service proves no outage.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        rng: random.Random,
        furthest_bytes: int = 0,
        *,
        server: str = "the server",
    ) -> None:
        """``furthest_bytes`` are there before the first attempt; errors name the ``server``."""
        self._policy = policy
        self._rng = rng
        self._server = server
        self._furthest_bytes = furthest_bytes
        self._failures = 0
        """Since the call last got further."""

        self._down_s = 0.0
        """Of this outage, before ``_silent_since_s``."""

        self._silent_since_s = 0.0
        self._is_flowing = False

    def reached(self, position_bytes: int, now_s: float) -> None:
        """Note that the bytes before this position of the file or body have come through."""
        if position_bytes > self._furthest_bytes:
            self._furthest_bytes = position_bytes
            self._failures, self._down_s = 0, 0.0
        elif self._failures and not self._is_flowing:
            self._down_s += now_s - self._silent_since_s
        self._is_flowing, self._silent_since_s = True, now_s

    def failed(self, reason: str, now_s: float) -> float:
        """Return the wait in seconds before the next attempt, after one has failed.

        Raises:
            ServerGoneError: the call has got nowhere for ``retry_for_s``.
        """
        if not self._failures:
            self._silent_since_s = now_s
        self._is_flowing = False
        policy = self._policy
        left_s = policy.retry_for_s - self._down_s - (now_s - self._silent_since_s)
        if left_s <= 0:
            raise ServerGoneError(
                f"nothing new has come through from {self._server} for {policy.retry_for_s:g} s"
                f" ({reason}); a batch that the server has accepted goes on without us"
            )
        self._failures += 1
        pause_s = backoff_s(self._failures, policy.first_delay_s, policy.max_delay_s, self._rng)
        return min(pause_s, left_s)
