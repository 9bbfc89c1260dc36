"""Room on a disk, asked for before anything but the database is written there."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of the system that say that the disk, or a user's part of it, is full."""


def no_bound(_size_bytes: int) -> AbstractContextManager[None]:
    """Give room, whatever is left on the disk."""
    return nullcontext()


class DiskRoom:
    """The free bytes of one disk, less those that have been promised. For any thread.

    All methods block, and raise OSError when the disk cannot be looked at.
    """

    def __init__(self, directory: Path, give_way: Callable[[], None]) -> None:
        """``directory`` is on the disk; ``give_way`` deletes files that can be done without."""
        self._directory = directory
        self._give_way = give_way
        self._lock = threading.Lock()
        self._promised_bytes = 0

    def free_bytes(self, wanted_bytes: int = 0) -> int:
        """Return the free bytes. Where fewer than ``wanted_bytes`` are, files give way first."""
        with self._lock:
            if (free_bytes := self._free_bytes()) < wanted_bytes:
                self._give_way()
                free_bytes = self._free_bytes()
            return free_bytes

    @contextmanager
    def take(
        self, size_bytes: int, kept_bytes: int, *, may_displace: bool = True
    ) -> Generator[None]:
        """Enter to write ``size_bytes``. Files give way first, if ``may_displace`` says so.

        Raises:
            OSError: ENOSPC, as fewer than ``kept_bytes`` would then be free.
        """
        with self._lock:
            wanted_bytes = size_bytes + kept_bytes
            if may_displace and self._free_bytes() < wanted_bytes:
                self._give_way()
            if self._free_bytes() < wanted_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._promised_bytes += size_bytes
        try:
            yield
        finally:
            with self._lock:
                self._promised_bytes -= size_bytes

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._directory).free - self._promised_bytes
