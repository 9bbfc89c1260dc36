"""A command in a process of its own that ends in time, with all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

__all__ = ["Ended", "run_child"]

_PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    """As in ``subprocess``: negative for a signal."""

    was_stopped: bool
    """It ran into its limit, and was told to end."""

    was_killed: bool
    """It did not end in the time that it was given to."""


def run_child(
    command: Sequence[str],
    *,
    limit_s: float,
    grace_s: float,
    log: IO[bytes],
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Run a command, stdout and stderr to ``log``.

    At the limit it gets SIGINT, which it should answer by ending its own processes
    and keeping its results, and ``grace_s`` later SIGKILL. A KeyboardInterrupt does
    the same, and is raised again. What is left of its descendants is killed, those in
    sessions of their own too: a server that stayed would keep the GPU's memory.

    Linux only; from one thread at a time.
    """
    # Orphans become our children, whatever they did to their session or their environment.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    others = _children()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=env,
        # A terminal's Ctrl-C reaches only us, and we pass it on.
        start_new_session=True,
    )
    was_stopped = was_killed = False
    try:
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            was_stopped = True
            was_killed = not _ends_when_asked(process, grace_s)
        except KeyboardInterrupt:
            _ends_when_asked(process, grace_s)
            raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        _kill_children(others)
    return Ended(process.returncode, was_stopped, was_killed)


def _ends_when_asked(process: subprocess.Popen[bytes], grace_s: float) -> bool:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(grace_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        return False
    return True


def _children() -> set[int]:
    """Return the processes whose parent we are."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # After the name, which may hold anything: state, parent.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    found.add(int(folder.name))
    return found


def _kill_children(others: set[int]) -> None:
    """Kill all children but ``others``, and theirs, which become ours when they are orphans."""
    while orphans := _children() - others:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
