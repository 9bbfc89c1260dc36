"""When a line is tried again on which the engine failed."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["RetryPolicy"]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with jitter, a limited number of times."""

    max_attempts: int
    first_delay_s: float
    max_delay_s: float

    def delay_s(self, failures: int, rng: random.Random) -> float | None:
        """Return how long to wait after the ``failures``-th failure; None to give the line up."""
        assert failures >= 1
        if failures >= self.max_attempts:
            return None
        # The exponent is capped because a float overflows long before patience does.
        backoff_s = self.first_delay_s * 2.0 ** min(failures - 1, 30)
        return min(self.max_delay_s, backoff_s) * rng.uniform(0.5, 1.0)
