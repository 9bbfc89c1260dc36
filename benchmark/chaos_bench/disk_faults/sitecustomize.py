"""Runs at the start of a server's processes: notes what is synced, and lets syncs fail.

With a folder in ``CHAOS_DISK``: each sync of a file is noted in ``synced``, and fails with EIO
while there is a file ``failing``. What the kernel then still has would be lost with the power;
``supervised_server`` cuts it off. SQLite's own syncs are not seen.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

_FOLDER = os.environ.get("CHAOS_DISK")


def _noting(sync: Callable[[Any], None]) -> Callable[[Any], None]:
    def noting(file: Any) -> None:
        if os.path.exists(f"{_FOLDER}/failing"):  # noqa: PTH110
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        found = os.fstat(file if isinstance(file, int) else file.fileno())
        sync(file)
        notes = os.open(f"{_FOLDER}/synced", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(notes, f"{found.st_ino} {found.st_size}\n".encode())
        os.close(notes)

    return noting


if _FOLDER:
    os.fsync = _noting(os.fsync)  # type: ignore[assignment]
    os.fdatasync = _noting(os.fdatasync)  # type: ignore[assignment]
