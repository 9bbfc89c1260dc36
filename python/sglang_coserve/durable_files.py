"""Writes files so that what counts as written survives a power failure.

Bytes that can be read may be in memory only, and after a failed sync the kernel forgets that they
still have to be written: a second sync succeeds and writes nothing. So

- ``append`` adds all of its bytes, synced, or leaves the file as it was;
- ``settle`` writes again what a crash may have left in memory, before anybody counts it;
- ``replace`` syncs a new file before it gets its name, and the name after it;
- ``lock_file`` locks a file for one process at a time;
- ``sync_names`` makes the names in a directory last, ``make_directories`` those of directories.

All of them block, and raise OSError. What can be made again without loss, such as reports, logs
and KV of unfinished lines, is written without them; what reads it must expect anything.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO, Final

MAX_UNSYNCED_BYTES: Final = 4 << 20
"""A crash damages at most so many bytes at the end of a file that ``append`` has written: it syncs
as often. It is also what a start has to read and write again; smaller ones cost more syncs."""

_NO_NAMES_TO_SYNC: Final = frozenset({errno.EINVAL, errno.EBADF, errno.ENOTSUP})
"""Errors of file systems that cannot sync a directory. They have no better way."""


def append(fd: int, content: bytes, size_bytes: int) -> None:
    """Append ``content`` to a file of ``size_bytes``, open for appending, and sync it.

    On an error the file is cut back to ``size_bytes``. If that fails too, or the process is killed
    meanwhile, ``settle`` makes good what is found.
    """
    rest = memoryview(content)
    try:
        while rest:
            write_all(fd, rest[:MAX_UNSYNCED_BYTES])
            os.fdatasync(fd)
            rest = rest[MAX_UNSYNCED_BYTES:]
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, size_bytes)
        raise


def settle(path: Path, size_bytes: int, synced_bytes: int) -> None:
    """Cut ``path`` to ``size_bytes`` and sync it and its name; the first ``synced_bytes`` are.

    The others are written again in place, as a sync alone would not write what an earlier one
    failed to. Files of ``append`` are damaged at their end only: ``MAX_UNSYNCED_BYTES`` of what
    was found there are written again at the most.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found_bytes = os.fstat(fd).st_size
        at = max(synced_bytes, found_bytes - MAX_UNSYNCED_BYTES, 0)
        if found_bytes > size_bytes:
            os.ftruncate(fd, size_bytes)
        elif at >= size_bytes:
            return
        if at < size_bytes:
            content = _read(fd, size_bytes - at, at)
            write_all(fd, memoryview(content), at)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    sync_names(path.parent)


def replace(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o600) -> None:
    """Put what ``write`` writes at ``path``, whole: a crash leaves it, or what was there before.

    Several processes may do so at once: one of them wins. What a killed one leaves,
    ``discard`` removes.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "w+b") as file:
            write(file)
            file.flush()
            os.fdatasync(fd)
        os.replace(unfinished, path)  # noqa: PTH105  (One module for all calls that count.)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_names(path.parent)


def discard(path: Path) -> None:
    """Remove ``path``, if it is there, and what killed calls of ``replace`` have left beside it."""
    path.unlink(missing_ok=True)
    for unfinished in path.parent.glob(f"{escape(path.name)}.*.part"):
        unfinished.unlink(missing_ok=True)


def sync_names(directory: Path) -> None:
    """Force the names in a directory to the disk, where its file system can do so."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # One may write to it, but not read it.
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_NAMES_TO_SYNC:
            raise
    finally:
        os.close(fd)


def make_directories(path: Path, mode: int) -> None:
    """Make a directory and those above it that are missing, and force their names to the disk."""
    if not path.exists():
        make_directories(path.parent, 0o777)
        path.mkdir(mode, exist_ok=True)
        sync_names(path.parent)
    elif not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def write_all(fd: int, content: memoryview | bytes, at: int | None = None) -> None:
    """Write all of ``content``, at byte ``at`` or where the file stands. It is not synced."""
    rest = memoryview(content)
    while rest:
        count = os.write(fd, rest) if at is None else os.pwrite(fd, rest, at)
        rest = rest[count:]
        at = None if at is None else at + count


def _read(fd: int, size_bytes: int, at: int) -> bytes:
    pieces = []
    while size_bytes and (piece := os.pread(fd, size_bytes, at)):
        pieces.append(piece)
        size_bytes, at = size_bytes - len(piece), at + len(piece)
    return b"".join(pieces)


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
