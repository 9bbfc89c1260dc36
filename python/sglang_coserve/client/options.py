"""The options of a client."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_coserve.errors import ConfigError
from sglang_coserve.lines.retry import RetryPolicy

__all__ = ["ClientOptions"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings of a client.

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
    """Bodies in flight; a single larger one is sent alone."""

    seed: int | None = None
    """Seed of the jitter between retries; None takes one from the system."""

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
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be greater than 0, not {value}")
