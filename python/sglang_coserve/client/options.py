"""Settings of a client, and of one batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from sglang_coserve.durations import LONGEST_WINDOW_S, duration_s
from sglang_coserve.errors import ConfigError
from sglang_coserve.lines.serve_line import RetryPolicy

_MIB: Final = 1 << 20
_MOST_PRIORITY: Final = 100


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings of a client. All but ``retry_policy`` are for batches that the client keeps itself.

    Raises:
        ConfigError: a value is out of range.
    """

    concurrency: int = 64
    """Lines that the server has at the same time, over all jobs of the client."""

    request_timeout_s: float | None = None
    """Timeout of one attempt; None waits for as long as it takes."""

    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)

    max_line_bytes: int = 64 * _MIB
    """A longer line becomes an error record and is never held in memory."""

    max_inflight_bytes: int = 256 * _MIB
    """Lines in flight of one job; a single larger one is sent alone."""

    def __post_init__(self) -> None:
        policy = self.retry_policy
        for name, value in (
            ("concurrency", self.concurrency),
            ("max_line_bytes", self.max_line_bytes),
            ("max_inflight_bytes", self.max_inflight_bytes),
            ("max_attempts", policy.max_attempts),
            ("retry_for_s", policy.retry_for_s),
            ("request_timeout_s", self.request_timeout_s),
        ):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be greater than 0, not {value}")


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How a batch is to be served.

    Raises:
        ConfigError: a value that no server takes.
    """

    window: str | None = None
    """A duration: ``24h``, ``90m``, ``7d``. None is ``BatchApi.default_window``."""

    priority: int = 0
    """Batches of a higher one go first."""

    def __str__(self) -> str:
        return f"the window {self.window or 'by default'} and the priority {self.priority}"

    def __post_init__(self) -> None:
        # Before anything is uploaded.
        window_s = 1.0 if self.window is None else duration_s(self.window)
        if window_s is None or not 0 < window_s <= LONGEST_WINDOW_S:
            raise ConfigError(
                f"the window {self.window!r} is no duration of up to 366 days: use 24h, 90m, 1h30m"
                " or 7d"
            )
        if not -_MOST_PRIORITY <= self.priority <= _MOST_PRIORITY:
            raise ConfigError(
                f"the priority {self.priority} is not between {-_MOST_PRIORITY} and"
                f" {_MOST_PRIORITY}"
            )
