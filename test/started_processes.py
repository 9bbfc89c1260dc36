"""Processes that a command or a server has started."""

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
    return [process for process in found if is_alive(process.pid)]


def is_alive(pid: int) -> bool:
    """Return whether it runs; one that has ended and was not waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def of_engine(pid: int, name: str = "") -> list[psutil.Process]:
    """The processes of a server's engine, or its schedulers, say."""
    children = psutil.Process(pid).children(recursive=True)
    return [one for one in children if " ".join(one.cmdline()).startswith(f"sglang::{name}")]
