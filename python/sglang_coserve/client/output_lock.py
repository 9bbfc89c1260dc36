"""One client at a time for an output."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sglang_coserve.errors import InputFileError

__all__ = ["lock_output"]


def lock_output(output: Path, path: Path) -> int:
    """Return ``path``, which stands for ``output``, open and locked; it is made if need be.

    The lock ends when the file is closed.

    Raises:
        InputFileError: another client has it, or it cannot be written.
    """
    if path.exists() and not path.is_file():
        raise InputFileError(f"{path} is not a regular file: choose another output")
    fd = None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if fd is not None:
            os.close(fd)
        if isinstance(error, BlockingIOError):
            raise InputFileError(
                f"{output} is being written by another client:"
                " wait for it to end, or choose another output"
            ) from error
        raise InputFileError(f"cannot write {path}: {error.strerror}") from error
    return fd
