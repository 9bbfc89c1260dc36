"""What the parts of the benchmark have in common."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from batch_bench.options import BatchBenchOptions
from common.batch_server import BatchServer
from common.model import ServedModel

__all__ = ["Setting"]


@dataclass(frozen=True, slots=True)
class Setting:
    """The model, what was asked for, and where things go."""

    options: BatchBenchOptions
    model: ServedModel
    work: Path
    """Inputs and data directories; removed at the end."""

    logs: Path
    progress: Progress

    def server(self, name: str, *flags: str) -> BatchServer:
        """Return a server that is still to be entered; ``name`` is that of its directory."""
        common = ("--model-path", self.model.path, "--log-level", "warning")
        return BatchServer(
            [*common, "--offline-policy", "fifo", *flags, *self.options.server_flags],
            self.work / name,
            self.logs / f"{name}.log",
            self.options.ready_timeout_s,
        )

    def track(self, count: int, what: str) -> Generator[int]:
        """Yield the numbers below ``count``, and show how far that is."""
        task = self.progress.add_task(what, total=count)
        try:
            for number in range(count):
                yield number
                self.progress.advance(task)
        finally:
            self.progress.remove_task(task)
