"""The progress of a batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

__all__ = ["JobState", "JobStatus"]


class JobState(Enum):
    """The state of a job."""

    RUNNING = "running"
    COMPLETED = "completed"
    """Every line has a record: an answer, or why there is none (its window was over, say)."""

    CANCELLED = "cancelled"
    """Stopped on purpose; submitting it again continues it."""

    FAILED = "failed"
    """Stopped by an error, which ``wait`` raises; submitting it again continues it."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A moment in the life of a job.

    ``ok`` and ``failed`` count the records in the files, those of earlier runs
    included. Tokens and seconds are of this run only.
    """

    state: JobState
    ok: int
    failed: int

    resumed: int
    """Records, of ``ok`` and ``failed``, that an earlier run had written."""

    done_bytes: int
    """Bytes of the input whose lines are finished or blank."""

    total_bytes: int
    """Size of the input."""

    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float

    trouble: str | None
    """Why lines are being retried; None while the server answers."""

    ordered_share: float | None = None
    """Part of the input read to order its lines by prefix; None when that is not going on."""

    batch_id: str | None = None
    """The batch that the server runs; None when it is sent line by line."""

    batch_state: str | None = None
    """The server's status of the batch."""

    eta_s: float | None = None
    """When the server expects the batch to be complete, in seconds since the epoch."""

    @property
    def tokens_per_s(self) -> float:
        """Prompt and completion tokens a second, over this run."""
        tokens = self.prompt_tokens + self.completion_tokens
        return tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def completion_tokens_per_s(self) -> float:
        """Completion tokens a second, over this run."""
        return self.completion_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return every field and rate as plain JSON values."""
        return asdict(self) | {
            "state": self.state.value,
            "elapsed_s": round(self.elapsed_s, 3),
            "tokens_per_s": round(self.tokens_per_s, 3),
            "completion_tokens_per_s": round(self.completion_tokens_per_s, 3),
        }
