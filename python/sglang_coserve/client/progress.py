"""Shows a running job on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from sglang_coserve.client.status import JobStatus
from sglang_coserve.printable import printable

__all__ = ["showing"]

_PLAIN_INTERVAL_S = 10.0
_POLL_S = 0.2

_T = TypeVar("_T")


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

    def show(self, status: JobStatus | str) -> None:
        """Show ``status`` now, or why there is none yet; on a plain stream, once in a while."""
        if isinstance(status, str):
            text = _one_line(f"waiting for the server: {status}")
            self._show(text, text, 0, None)
            return
        percent = 100 * status.done_bytes // max(1, status.total_bytes)
        description = _describe(status)
        plain = f"{percent}% of the input: {description}"
        self._show(description, plain, status.done_bytes, status.total_bytes)

    def _show(self, text: str, plain: str, done: int, total: int | None) -> None:
        if self._bar:
            self._bar.update(self._task, completed=done, total=total, description=text)
        elif time.monotonic() - self._shown_s >= _PLAIN_INTERVAL_S:
            self._shown_s = time.monotonic()
            sys.stderr.write(f"{plain}\n")
            sys.stderr.flush()


async def showing(work: Awaitable[_T], status: Callable[[], JobStatus | str | None]) -> _T:
    """Await ``work``, and show meanwhile what ``status`` returns, unless that is None."""
    task = asyncio.ensure_future(work)
    try:
        with ProgressView() as view:
            while not task.done():
                if (shown := status()) is not None:
                    view.show(shown)
                await asyncio.wait({task}, timeout=_POLL_S)
        return task.result()
    finally:
        task.cancel()


def _describe(status: JobStatus) -> str:
    return _one_line(_description(status))


def _one_line(text: str) -> str:
    # A server's message may have more lines, and worse.
    return " ".join(printable(text).split())


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
