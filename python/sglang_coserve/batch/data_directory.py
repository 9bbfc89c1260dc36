"""Where the Batch API keeps everything, one server at a time.

::

    coserve.sqlite      rows of files, batches and events
    files/<file id>     uploads, outputs and error files
    journal/<batch id>  generated tokens of lines that are not finished
    order/<batch id>    the order in which lines are served
    in_doubt/<file id>  empty; says that the file is being added or deleted
    in_flight           the lines that the engine has
    spare               nothing, to be deleted where the disk is full
    fatal_signal        the stacks of a server that died of a signal
    lock

Files in journal/ and order/ may be deleted at any time. The server deletes them when the disk is
full.

It holds what users have sent and got, so it is its owner's alone: whatever the umask, files
are made with the mode 0600 and directories with 0700. A server refuses wider ones.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Final

from sglang_coserve.disk_room import DiskRoom
from sglang_coserve.durable_files import (
    lock_file,
    make_directories,
    sync_names,
    unlock_file,
)
from sglang_coserve.errors import StartupError, disk_errors
from sglang_coserve.told_faults import without_directories

_ID: Final = re.compile(r"[a-z]{1,8}[-_][0-9a-f]{24}")
_SPARE_BYTES: Final = 1 << 20
"""Takes a start, and the first cancellations and deletions, on a disk that others have filled."""

OTHER_DIRECTORY: Final = "name another --coserve-data-dir"
"""What to do about a directory that a server cannot use."""

_log = logging.getLogger(__name__)


class InUseError(StartupError):
    """Another process has the data directory."""


class DataDirectory:
    """The paths, and the lock on them.

    The store decides whether a file exists: its row is inserted after the last byte is on the disk,
    and deleted before the bytes are. While bytes may exist without a row, there is a mark in
    ``in_doubt/``; after a crash, ``settle`` looks at marked files only.
    """

    def __init__(
        self, root: Path, *, hint: str = OTHER_DIRECTORY, must_be_private: bool = True
    ) -> None:
        """``hint`` says in errors what to do about a directory that cannot be used. Unless it
        ``must_be_private``, wide modes are a warning: some mounts know no others.
        """
        self.root = root
        self._hint = hint
        self._must_be_private = must_be_private
        self.database = root / "coserve.sqlite"
        self.in_flight = root / "in_flight"
        self.fatal_signal = root / "fatal_signal"
        self._files = root / "files"
        self._journals = root / "journal"
        self._orders = root / "order"
        self._in_doubt = root / "in_doubt"
        self._spare = root / "spare"
        self.room = DiskRoom(root, partial(self._empty, self._journals))
        """The room on the disk, to which journals give way."""

        self._lock_fd: int | None = None

    def open(self) -> None:
        """Make the directory when it is not there, and lock it.

        Raises:
            StartupError: it cannot be written, or others can read or write it.
            InUseError: another server is using it.
        """
        try:
            own = (self._files, self._journals, self._orders, self._in_doubt)
            for directory in (self.root, *own):
                make_directories(directory, 0o700)
                self._check_private(directory)
            self._lock()
            # SQLite would make it, as wide as the umask lets it, and gives its mode to the
            # files beside it.
            os.close(os.open(self.database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            for path in self.root.glob(f"{self.database.name}*"):
                self._check_private(path)
            self._probe()
        except StartupError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise StartupError(
                f"cannot use the data directory {self.root}: {error.strerror}; {self._hint}"
            ) from error

    def _probe(self) -> None:
        """Write the spare file. On a full disk that file, journals and orders are deleted first.

        A server starts on a disk that is still full then, so that its clients can delete files.
        """
        if self.room.free_bytes() < 2 * _SPARE_BYTES:
            self._spare.unlink(missing_ok=True)
            self._empty(self._journals, self._orders)
        if self.room.free_bytes() < 2 * _SPARE_BYTES:
            _log.error("the disk of %s is full: batches wait until files are deleted", self.root)
            return
        self._spare.touch(mode=0o600)
        self._spare.write_bytes(bytes(_SPARE_BYTES))

    def _empty(self, *directories: Path) -> None:
        """Delete all files in ``directories``: nothing is lost with them but work."""
        number = size_bytes = 0
        for directory in directories:
            for path in directory.iterdir():
                with suppress(FileNotFoundError):
                    size_bytes += path.stat().st_size
                    path.unlink()
                    number += 1
        if number:
            _log.warning(
                "the disk of %s is full: %d journals or orders (%d bytes) of batches were deleted;"
                " their half-done lines start over after a crash",
                *(self.root, number, size_bytes),
            )

    def _check_private(self, path: Path) -> None:
        """Refuse, or warn of, what other users can read or write. Links are followed."""
        found = path.stat()
        if found.st_uid != os.geteuid():
            raise StartupError(
                f"{path} belongs to the user with the number {found.st_uid}, and this process runs"
                f" as {os.geteuid()}: {self._hint}, or, if its content is to be trusted:"
                f" chown -R {os.geteuid()} {quote(str(self.root))}"
            )
        if found.st_mode & 0o077:
            fault = (
                f"{path} holds prompts and answers, and others than its owner may read or write"
                f" it (mode {stat.S_IMODE(found.st_mode):04o})"
            )
            if self._must_be_private:
                raise StartupError(f"{fault}: chmod -R go= {quote(str(self.root))}")
            if path == self.root:
                _log.warning("%s", fault)

    def _lock(self) -> None:
        try:
            self._lock_fd = lock_file(self.root / "lock", 0o600)
        except BlockingIOError:
            raise InUseError(
                f"the data directory {self.root} is in use by another server:"
                f" stop that one, or {self._hint}"
            ) from None

    def close(self) -> None:
        """Release the lock, so that another server can use the directory."""
        if self._lock_fd is not None:
            unlock_file(self._lock_fd)
            self._lock_fd = None

    def told(self, error: Exception) -> str:
        """Return an error's message for clients, with paths as they are within the directory, and
        of other files the names alone."""
        text = str(error).replace(f"{self.root}/", "").replace(str(self.root), "the data directory")
        return without_directories(text)

    def file(self, file_id: str) -> Path:
        """Return where a stored file is."""
        return self._files / _checked(file_id)

    def journal(self, batch_id: str) -> Path:
        """Return where the tokens of a batch's unfinished lines are."""
        return self._journals / _checked(batch_id)

    def order(self, batch_id: str) -> Path:
        """Return where the order of a batch's lines is, once there is one."""
        return self._orders / _checked(batch_id)

    def sync_files(self) -> None:
        """Force the names in ``files/`` to the disk. Blocks."""
        sync_names(self._files)

    # The methods below block, and raise StorageError when the disk is full or failing, or the
    # directory is gone.

    def free_bytes(self, wanted_bytes: int = 0) -> int:
        """Return the free bytes on the disk; journals give way to ``wanted_bytes``."""
        with disk_errors(f"cannot use {self.root}"):
            return self.room.free_bytes(wanted_bytes)

    def make_room(self) -> None:
        """Make room for the database: delete the spare file and all journals."""
        with disk_errors(f"cannot use {self.root}"):
            self._spare.unlink(missing_ok=True)
            self._empty(self._journals)

    def mark_in_doubt(self, file_id: str) -> None:
        """Mark a file that is about to be added or deleted."""
        with disk_errors(f"file {file_id} cannot be added or deleted"):
            (self._in_doubt / _checked(file_id)).touch(mode=0o600)
            sync_names(self._in_doubt)

    def confirm(self, file_id: str) -> None:
        """Unmark a file that the store has: it stays."""
        with disk_errors(f"file {file_id} cannot be kept"):
            (self._in_doubt / _checked(file_id)).unlink(missing_ok=True)

    def discard(self, file_id: str) -> None:
        """Delete a marked file that the store does not know."""
        with disk_errors(f"file {file_id} cannot be deleted"):
            self.file(file_id).unlink(missing_ok=True)
            # Without the mark, what is still there after a crash would stay for ever.
            self.sync_files()
        self.confirm(file_id)

    def settle(self, is_known: Callable[[str], bool]) -> None:
        """Keep the marked files that the store knows, and discard the others."""
        with disk_errors(f"cannot use {self.root}"):
            marked = list(self._in_doubt.iterdir())
        for path in marked:
            (self.confirm if is_known(path.name) else self.discard)(path.name)


def _checked(name: str) -> str:
    assert _ID.fullmatch(name), f"not an id: {name!r}"
    return name
