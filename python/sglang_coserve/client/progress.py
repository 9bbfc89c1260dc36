"""The progress of a job, and how it is shown on standard error: a bar, or plain lines elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Self, TypeVar

from sglang_coserve.client.batch_api import NO_BATCH, Batch
from sglang_coserve.terminal import ProgressBar, printable

_POLL_S = 0.2
_BAR_CHARS = 40
"""Of a trouble, beside the bar in a terminal of 80 columns."""

_T = TypeVar("_T")


class JobState(Enum):
    """The state of a job."""

    RUNNING = "running"
    COMPLETED = "completed"
    """Every line has a record: an answer, or why there is none (its window was over, say)."""

    CANCELLED = "cancelled"
    """Stopped on purpose; submitting it again continues it."""

    FAILED = "failed"
    """Stopped by an error, which ``wait`` raises. ``can_continue`` of the job says if submitting it
    again continues it."""


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

    total: int
    """Lines of the batch; 0 before they have been counted."""

    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float

    trouble: str | None
    """Why the batch makes no progress, or may miss its window; None while all is well."""

    batch_id: str | None = None
    """None before there is one."""

    batch_state: str | None = None
    """The status of the batch."""

    is_local: bool = False
    """Whether the client keeps the batch, which stands still while no job runs."""

    eta_s: float | None = None
    """When the batch is expected to be complete, in seconds since the epoch."""

    @classmethod
    def of(
        cls,
        state: JobState,
        batch: Batch | None,
        first: Batch | None = None,
        *,
        elapsed_s: float,
        last_failure: str | None = None,
        is_local: bool = False,
    ) -> Self:
        """Return a batch as the status of a job; None is a batch that does not exist yet.

        ``first`` is the batch when the job began. ``last_failure`` is why a call is being retried.
        """
        now, before = batch or NO_BATCH, first or NO_BATCH
        counts, resumed, extra = now["request_counts"], before["request_counts"], now["coserve"]
        paused = "paused" if extra.get("paused") else None
        return cls(
            state=state,
            ok=counts["completed"],
            failed=counts["failed"],
            resumed=resumed["completed"] + resumed["failed"],
            total=counts["total"],
            prompt_tokens=now["usage"]["input_tokens"] - before["usage"]["input_tokens"],
            completion_tokens=now["usage"]["output_tokens"] - before["usage"]["output_tokens"],
            elapsed_s=elapsed_s,
            trouble=(last_failure or extra.get("warning") or paused)
            if state is JobState.RUNNING
            else None,
            batch_id=now["id"],
            batch_state=now["status"],
            is_local=is_local,
            eta_s=extra.get("eta"),
        )

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
        line = _one_line(_description(status))
        done = status.ok + status.failed
        percent = 100 * done // max(1, status.total)
        # The bar says by itself how much time remains, and a longer text would hide it.
        counts = f"{status.ok} ok, {status.failed} failed"
        text = _one_line(f"{counts}, {status.trouble[:_BAR_CHARS]}" if status.trouble else counts)
        self._show(
            done,
            lambda: f"{percent}% of the lines: {line}",
            text=text,
            total=status.total or None,
        )


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
