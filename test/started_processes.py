"""Processes that a command has started, found by a path of the test's that their command has."""

from __future__ import annotations

from pathlib import Path

import psutil


def processes_of(out: Path) -> list[psutil.Process]:
    """Living processes whose command names ``out``, and those that they started."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(out) in " ".join(process.cmdline()):
                found += [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
    return list(filter(is_alive, found))


def is_alive(process: psutil.Process) -> bool:
    """Return whether it runs; one that has ended and was not waited for does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
