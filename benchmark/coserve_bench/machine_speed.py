"""How fast the machine is around each run: a fixed computation, and the time others took.

Shared machines change speed by more than what systems differ by. A fixed computation
before and after each run, and the processor time that the host gave to other guests
meanwhile, say which runs were measured on the machine as it usually is.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import torch

__all__ = ["MachineSpeed", "SpeedLog", "measure_speed_ms"]

T = TypeVar("T")

_PROBE_S: Final = 2.0
_LEAST_PROBE_S: Final = 0.1
_COPIED_FLOATS: Final = 4 * 2**20
"""16 MiB, more than a core's caches: neighbours take memory bandwidth, too."""
_FIRST_MEASUREMENTS: Final = 5


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """The machine around one run."""

    before_ms: float
    """What the fixed computation took before the run, see ``measure_speed_ms``."""

    after_ms: float
    """The same after it."""

    stolen: float
    """Share of the processors' time during the run that the host gave to other guests."""

    def deviation(self, usual_ms: float) -> float:
        """Return how far from its usual speed the machine was, as a share of it.

        Faster counts as slower does: ratios are taken between runs.
        """
        ratios = (self.before_ms / usual_ms, self.after_ms / usual_ms)
        return max(self.stolen, *(abs(ratio - 1) for ratio in ratios))


class SpeedLog:
    """Every measurement of the machine so far, and what is usual among them.

    Kept in a file, so that a command that goes on judges as the first one did.
    """

    def __init__(self, path: Path) -> None:
        """Read what earlier commands measured."""
        self._path = path
        self.measured_ms: list[float] = json.loads(path.read_text()) if path.exists() else []

    def usual_ms(self) -> float:
        """Return the median so far; measures a few times where there is nothing yet."""
        while len(self.measured_ms) < _FIRST_MEASUREMENTS:
            self.measure_ms()
        return statistics.median(self.measured_ms)

    def measure_ms(self) -> float:
        """Measure the machine, which must be idle, and remember the result."""
        self.measured_ms.append(measure_speed_ms())
        self._path.write_text(json.dumps(self.measured_ms) + "\n")
        return self.measured_ms[-1]

    def is_usual(self, speed: MachineSpeed, tolerance: float) -> bool:
        """Tell whether the machine was within ``tolerance`` of its usual speed."""
        return speed.deviation(self.usual_ms()) <= tolerance

    async def run_at_usual_speed(
        self,
        run: Callable[[], Awaitable[T]],
        suspended_process: Callable[[], AbstractContextManager[None]],
        *,
        tolerance: float,
        repeats: int,
    ) -> tuple[T, MachineSpeed]:
        """Return what ``run`` gave when the machine was closest to its usual speed.

        Runs once where that was within ``tolerance``, else ``repeats`` times more at most.
        ``suspended_process`` keeps the machine idle while it is measured.
        """

        async def measured_ms() -> float:
            with suspended_process():
                await asyncio.to_thread(self.usual_ms)
                return await asyncio.to_thread(self.measure_ms)

        runs: list[tuple[T, MachineSpeed]] = []
        for _ in range(1 + repeats):
            before_ms = await measured_ms()
            stolen, total = _processor_time()
            given = await run()
            stolen_then, total_then = _processor_time()
            share = (stolen_then - stolen) / max(1, total_then - total)
            runs.append((given, MachineSpeed(before_ms, await measured_ms(), share)))
            if self.is_usual(runs[-1][1], tolerance):
                break
        usual_ms = self.usual_ms()
        return min(runs, key=lambda run: run[1].deviation(usual_ms))


def measure_speed_ms() -> float:
    """Return the time of a fixed computation on one core: the mean of the cores' medians.

    It resembles a step of the small model: matrices that fit the cache, fp32,
    memory that does not, and a stretch of plain Python. Takes about two seconds. The
    calling thread is bound to each core in turn, and to its own cores at the end.
    Processor time counts: what shares the core and is ours, a client that wakes up,
    say, is not the machine.
    """
    cores = os.sched_getaffinity(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return statistics.mean(_median_ms(core, _PROBE_S / len(cores)) for core in cores)
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)


def _median_ms(core: int, seconds: float) -> float:
    os.sched_setaffinity(0, {core})
    rows, wide, narrow = torch.ones(128, 256), torch.ones(256, 1024), torch.ones(1024, 256)
    source, target = torch.ones(_COPIED_FLOATS), torch.ones(_COPIED_FLOATS)
    times_ms = []
    ends_s = time.perf_counter() + max(seconds, _LEAST_PROBE_S)
    while time.perf_counter() < ends_s:
        began_s = time.thread_time()
        hidden = rows
        for _ in range(8):
            hidden = (hidden @ wide) @ narrow / (256 * 1024)
        target.copy_(source)
        sum(range(20_000))
        times_ms.append((time.thread_time() - began_s) * 1e3)
    return statistics.median(times_ms)


def _processor_time() -> tuple[int, int]:
    """Return (stolen, all) processor time since the machine started, in ticks.

    (0, 0) where the system does not say.
    """
    statistics_file = Path("/proc/stat")
    if not statistics_file.exists():
        return 0, 0
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user.
    fields = [int(field) for field in statistics_file.read_text().splitlines()[0].split()[1:9]]
    return fields[7], sum(fields)
