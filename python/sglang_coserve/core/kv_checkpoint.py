"""Decides which KV pages of offline requests to save to host memory, and when.

ConServe §4.4, BROS §V.

Decisions are immutable values. Time is counted in steps, so that all ranks of a tensor-parallel
engine decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

_LOADED_TOKENS: Final = 4096
_LOADED_SHARE: Final = 0.25
"""Most tokens loaded at a time, absolute and as a share of the device's KV: that much is lost if
loads get stuck."""


def most_loaded_tokens(device_tokens: int) -> int:
    """Return how many tokens may be on their way from host memory, of a device with so many."""
    return min(_LOADED_TOKENS, int(_LOADED_SHARE * device_tokens))


class CheckpointMode(Enum):
    """When offline KV is copied to host memory."""

    OFF = "off"

    EAGER = "eager"
    """After each step, its new full pages (ConServe): many small copies, instant reclaim."""

    LAZY = "lazy"
    """Pages about to be reclaimed (BROS): fewest copies, but online admission waits for them."""

    PRESSURE = "pressure"
    """Like eager, but only while device memory is nearly full."""


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Limits on how much is copied and reclaimed at a time."""

    mode: CheckpointMode
    watermark: float = 0.8
    """Share of the device's KV slots in use from which ``PRESSURE`` copies."""

    least_copy_tokens: int = 16
    """Fewest tokens of a request to copy at a time. With smaller pages (in SGLang often one token),
    each step would otherwise copy a page of every request, although a copy costs the scheduler the
    same for one token as for many."""

    step_tokens: int = 4096
    """Most tokens whose copy begins in one step; a prefix, saved whole, may exceed it."""

    in_flight_tokens: int = 16384
    """Most tokens whose copies are in flight at a time."""

    stall_steps: int = 256
    """A copy that takes longer than this many steps counts as stuck: no more copies are begun."""

    reclaim_tokens: int = 128
    """Fewest tokens to reclaim at a time, so that not every step reclaims a few."""


def plan_copies(
    policy: CheckpointPolicy,
    dirty_tokens: Mapping[str, int],
    page_tokens: int,
    *,
    used_share: float,
    in_flight_tokens: int = 0,
) -> dict[str, int]:
    """Return how many of the first dirty tokens of which requests to copy now. O(requests).

    The requests admitted last come first, as they are retracted first.

    Only whole pages are copied. ``dirty_tokens`` is what each offline request has to save, in order
    of admission; copies of ``in_flight_tokens`` are under way. ``used_share`` is that of the
    device's KV slots that requests hold, 0 to 1.
    """
    if policy.mode in (CheckpointMode.OFF, CheckpointMode.LAZY):
        return {}
    if policy.mode is CheckpointMode.PRESSURE and used_share < policy.watermark:
        return {}
    left = max(min(policy.step_tokens, policy.in_flight_tokens - in_flight_tokens), 0)
    copies = {}
    for rid, dirty in reversed(list(dirty_tokens.items())):
        if dirty < policy.least_copy_tokens:
            continue
        tokens = min(dirty, left) // page_tokens * page_tokens
        if tokens:
            copies[rid] = tokens
            left -= tokens
    return copies


def reclaim_tokens(wanted_tokens: int, least_tokens: int, page_tokens: int) -> int:
    """Return how many tokens to reclaim, in whole pages, when ``wanted_tokens`` are needed."""
    return -(-max(wanted_tokens, least_tokens) // page_tokens) * page_tokens


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off after host memory was refused: 1, 2, 4 … steps without a request."""

    most_steps: int = 256
    failures: int = 0
    retry_step: int = 0

    def may_try(self, step: int) -> bool:
        """Return whether host memory may be requested in this step."""
        return step >= self.retry_step

    def failed(self, step: int) -> Backoff:
        """Return the back-off after a refusal in this step."""
        wait = min(2**self.failures, self.most_steps)
        return replace(self, failures=min(self.failures + 1, 32), retry_step=step + 1 + wait)

    def succeeded(self) -> Backoff:
        """Return the back-off after memory was granted."""
        return replace(self, failures=0, retry_step=0) if self.failures else self
