"""Shows a running job on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from sglang_coserve.client.status import JobStatus
from sglang_coserve.printable import printable

__all__ = ["ProgressView"]

_PLAIN_INTERVAL_S = 10.0


class ProgressView:
    """A context in which ``show`` keeps the user informed."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.description}", markup=False),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=None)
        self._shown_s = time.monotonic()

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, status: JobStatus) -> None:
        """Show ``status`` now; on a plain stream, once in a while."""
        if self._bar:
            self._bar.update(
                self._task,
                completed=status.done_bytes,
                total=status.total_bytes,
                description=_describe(status),
            )
        elif time.monotonic() - self._shown_s >= _PLAIN_INTERVAL_S:
            self._shown_s = time.monotonic()
            percent = 100 * status.done_bytes // max(1, status.total_bytes)
            sys.stderr.write(f"{percent}% of the input: {_describe(status)}\n")
            sys.stderr.flush()


def _describe(status: JobStatus) -> str:
    # In one line: a server's message may have more, and worse.
    return " ".join(printable(_description(status)).split())


def _description(status: JobStatus) -> str:
    if status.batch_id:
        return _describe_batch(status)
    if status.trouble:
        return f"{status.ok} ok, {status.failed} failed; retrying: {status.trouble[:80]}"
    parts = f"{status.ok} ok, {status.failed} failed, {status.tokens_per_s:.0f} tokens/s"
    if status.ordered_share is not None:
        parts += f"; ordering by prefix: {100 * status.ordered_share:.0f}%"
    return parts


def _describe_batch(status: JobStatus) -> str:
    parts = [f"{status.batch_id} {status.batch_state}: {status.ok} ok, {status.failed} failed"]
    if status.eta_s is not None:
        at = datetime.fromtimestamp(status.eta_s).astimezone()
        parts.append(f"expected at {at:%Y-%m-%d %H:%M:%S}")
    if status.trouble:
        parts.append(status.trouble[:80])
    return ", ".join(parts)
