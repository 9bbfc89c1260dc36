"""CPU use of a server's processes, of the load's process and of the machine, during a window.

Latencies show an engine only where its scheduler has a core for itself. Otherwise they show
programs that wait for a core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import psutil

_ROLES: Final = {"sglang::schedul": "scheduler", "sglang::detoken": "detokenizer"}
"""Roles of SGLang's processes by the first 15 characters of their names. A rank may follow."""

_SERVER: Final = "http_server"
"""Role of a server's other processes. The tokenizer runs in the HTTP server."""

_CLIENT: Final = "client"
"""Role of this process, which sends the requests and times the answers."""

_OTHERS: Final = "other_programs"
"""Role of everything else on the machine, and of what a hypervisor took."""


class CpuTimes(NamedTuple):
    """CPU seconds so far."""

    by_role: dict[str, float]
    """Seconds of a server and of this process."""

    machine_s: float
    """Seconds of all processes."""

    @classmethod
    def read(cls, server_pid: int) -> Self:
        """Return the times now; ``server_pid`` is the first of the server's processes."""
        by_role = {_CLIENT: sum(os.times()[:2])}
        for name, seconds in _processes_of(psutil.Process(server_pid)):
            role = _ROLES.get(name[:15], _SERVER)
            by_role[role] = by_role.get(role, 0.0) + seconds
        return cls(by_role, _machine_s())


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Mean number of cores in use."""

    by_role: dict[str, float]
    """Cores of ``scheduler``, ``http_server``, ``detokenizer``, ``client`` and
    ``other_programs``."""

    @classmethod
    def between(cls, before: CpuTimes, after: CpuTimes, seconds: float) -> Self:
        """Return the use in a window of so many seconds."""
        ours = {
            role: (after_s - before.by_role.get(role, 0.0)) / seconds
            for role, after_s in after.by_role.items()
        }
        machine = (after.machine_s - before.machine_s) / seconds
        return cls({**ours, _OTHERS: max(machine - sum(ours.values()), 0.0)})

    @property
    def others(self) -> float:
        """Cores of programs that have nothing to do with the demo."""
        return self.by_role[_OTHERS]


def _processes_of(first: psutil.Process) -> Iterator[tuple[str, float]]:
    """Yield the name and the CPU seconds of a process and of all that it has started."""
    for process in (first, *first.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # It has ended meanwhile.
            yield process.name(), sum(process.cpu_times()[:2])


def _machine_s() -> float:
    """Return the CPU seconds that were in use, those that a hypervisor took among them."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
