"""One process at a time for a file."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["lock_file", "unlock_file"]


def lock_file(path: Path, mode: int) -> int:
    """Return ``path`` open and locked; it is made with ``mode`` if need be.

    The lock ends with the process, or with ``unlock_file``.

    Raises:
        BlockingIOError: another holder has it.
        OSError: it cannot be opened for writing.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def unlock_file(fd: int) -> None:
    """Let others lock the file, and close it."""
    # A process that is just being started has a copy of the descriptor until it runs its own
    # program: closing ours alone would keep the file locked until then.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
