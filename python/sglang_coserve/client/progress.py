"""The progress of a job, and how it is shown on standard error: a bar, or plain lines elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import Enum
from typing import Any, TypeVar

from sglang_coserve.terminal import ProgressBar, printable

_POLL_S = 0.2

_T = TypeVar("_T")


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

    ``ok`` and ``failed`` count the records of the batch, those of earlier runs
    included. Tokens and seconds are of this run only.
    """

    state: JobState
    ok: int
    failed: int

    resumed: int
    """Records, of ``ok`` and ``failed``, that the batch had when this run began."""

    done_bytes: int
    """Bytes of the input whose lines are finished, if all lines have the same length."""

    total_bytes: int
    """Size of the input."""

    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float

    trouble: str | None
    """Why lines are being retried; None while the server answers."""

    batch_id: str | None = None
    """None before there is one."""

    batch_state: str | None = None
    """The status of the batch."""

    is_local: bool = False
    """Whether the client keeps the batch, which stands still while no job runs."""

    eta_s: float | None = None
    """When the batch is expected to be complete, in seconds since the epoch."""

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


class _JobBar(ProgressBar):
    def show(self, status: JobStatus | str) -> None:
        """Show ``status``, or why there is none yet."""
        if isinstance(status, str):
            waiting = _one_line(f"waiting for the server: {status}")
            self._show(0, lambda: waiting, text=waiting)
            return
        text = _one_line(_description(status))
        percent = 100 * status.done_bytes // max(1, status.total_bytes)
        line = f"{percent}% of the input: {text}"
        self._show(status.done_bytes, lambda: line, text=text, total=status.total_bytes)


async def showing(work: Awaitable[_T], status: Callable[[], JobStatus | str | None]) -> _T:
    """Await ``work``, and show meanwhile what ``status`` returns, unless that is None."""
    task = asyncio.ensure_future(work)
    try:
        with _JobBar("starting") as bar:
            while not task.done():
                if (shown := status()) is not None:
                    bar.show(shown)
                await asyncio.wait({task}, timeout=_POLL_S)
        return task.result()
    finally:
        task.cancel()


def _one_line(text: str) -> str:
    # A server's message may have more lines, and worse.
    return " ".join(printable(text).split())


def _description(status: JobStatus) -> str:
    parts = [f"{status.ok} ok, {status.failed} failed"]
    if status.batch_id:
        parts = [f"{status.batch_id} {status.batch_state}: {parts[0]}"]
    if status.eta_s is not None:
        at = datetime.fromtimestamp(status.eta_s).astimezone()
        parts.append(f"expected at {at:%Y-%m-%d %H:%M:%S}")
    if status.trouble:
        parts.append(status.trouble[:80])
    return ", ".join(parts)
