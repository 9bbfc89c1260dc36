"""Locks a file for one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["lock_file", "unlock_file"]


def lock_file(path: Path, mode: int) -> int:
    """Open and lock ``path``, and return the file descriptor.

    The file is created with ``mode`` if necessary. The lock ends with the process, or with
    ``unlock_file``.

    Raises:
        BlockingIOError: it is locked already.
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
    """Unlock and close a file."""
    # A process that is just being started has a copy of the descriptor until it runs its own
    # program: closing ours alone would keep the file locked until then.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
