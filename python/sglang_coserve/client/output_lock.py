"""Locks an output: one client at a time."""

from __future__ import annotations

from pathlib import Path

from sglang_coserve.errors import InputFileError
from sglang_coserve.lines.file_lock import lock_file

__all__ = ["lock_output"]


def lock_output(output: Path, path: Path) -> int:
    """Return ``path``, which stands for ``output``, open and locked; it is made if need be.

    ``unlock_file`` ends it.

    Raises:
        InputFileError: another client has it, or it cannot be written.
    """
    if path.exists() and not path.is_file():
        raise InputFileError(f"{path} is not a regular file: choose another output")
    try:
        return lock_file(path, 0o666)
    except BlockingIOError as error:
        raise InputFileError(
            f"{output} is being written by another client:"
            " wait for it to end, or choose another output"
        ) from error
    except OSError as error:
        raise InputFileError(f"cannot write {path}: {error.strerror}") from error
