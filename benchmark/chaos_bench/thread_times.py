"""How long a thread ran, and how long it waited for a CPU, as Linux counts both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """Times of the main thread of a process, which runs the event loop of a server."""

    ran_ms: float
    waited_ms: float
    """Ready to run, while other threads had the CPUs."""

    @classmethod
    def of_process(cls, pid: int) -> Self:
        """Return the times since the process began; zeros if the process is gone, or the kernel
        does not count them.
        """
        try:
            ran_ns, waited_ns, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
        except (OSError, ValueError):
            return cls(0.0, 0.0)
        return cls(int(ran_ns) / 1e6, int(waited_ns) / 1e6)

    def __sub__(self, earlier: ThreadTimes) -> ThreadTimes:
        """Return the times since ``earlier``."""
        return ThreadTimes(self.ran_ms - earlier.ran_ms, self.waited_ms - earlier.waited_ms)
