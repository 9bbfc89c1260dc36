"""Processes that a command or a server has started."""

from __future__ import annotations

from pathlib import Path

import psutil

from sglang_coserve.local_server import ChildServer


def engine_processes(server: ChildServer, name: str = "") -> list[psutil.Process]:
    """SGLang's processes below a server: all, the ``scheduler`` of each rank, or the
    ``detokenizer``."""
    children = psutil.Process(server.pid).children(recursive=True)
    title = f"sglang::{name}"
    return [child for child in children if "".join(child.cmdline()[:1]).startswith(title)]


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


def is_alive(process: psutil.Process | int) -> bool:
    """Return whether it, given as such or by its id, runs; an ended one not waited for does not."""
    try:
        if isinstance(process, int):
            process = psutil.Process(process)
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
