"""A disk that loses power: what of real files would be there afterwards.

It watches the calls of ``os`` below one folder. What was synced is on the disk; of everything else
a power failure leaves any part: blocks with their old content, with zeros, or with the new one, and
names as they were or as they are. A sync that fails has the kernel forget what it was to write.
"""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BLOCK_BYTES = 16
"""Small, so that short files have many."""


@dataclass
class _Inode:
    fd: int
    synced: bytes = b""
    unwritten: set[int] = field(default_factory=set)
    """Blocks that the next sync writes."""

    @property
    def content(self) -> bytes:
        return os.pread(self.fd, 1 << 26, 0)

    def note(self, start: int, end: int) -> None:
        self.unwritten.update(range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)))

    def sync(self) -> None:
        content = self.content
        kept = self.synced[: len(content)].ljust(len(content), b"\0")
        self.synced = b"".join(
            (content if number in self.unwritten else kept)[at : at + BLOCK_BYTES]
            for number, at in enumerate(range(0, len(content), BLOCK_BYTES))
        )
        self.unwritten.clear()


@dataclass(frozen=True)
class Wreck:
    """What was where when the power failed."""

    files: dict[int, tuple[bytes, bytes]]
    """Synced and last content, by inode."""

    names: dict[str, tuple[int | None, int | None]]
    """Synced and last inode, by name."""

    def leave(self, folder: Path, rng: random.Random) -> None:
        """Write to ``folder`` one of the states that are possible now."""
        for path, (synced, last) in self.names.items():
            number = rng.choice((synced, last))
            if number is not None:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(_left(*self.files[number], rng))
                (folder / path).chmod(0o600)


def _left(synced: bytes, last: bytes, rng: random.Random) -> bytes:
    kind = rng.choice(("synced", "last", "blocks"))
    if kind != "blocks":
        return synced if kind == "synced" else last
    size_bytes = rng.choice((len(synced), len(last)))
    left = b""
    for at in range(0, size_bytes, BLOCK_BYTES):
        old, new = (each[at : at + BLOCK_BYTES] for each in (synced, last))
        left += (old if old == new else rng.choice((old, new))).ljust(BLOCK_BYTES, b"\0")
    return left[:size_bytes]


class PowerFailure:
    """The disk under ``folder``, whose power fails before its ``fails_at``-th operation.

    What runs goes on; ``wreck`` is what was left. ``failing_syncs`` are the numbers of those syncs
    of files that fail.
    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        fails_at: int,
        failing_syncs: frozenset[int] = frozenset(),
    ) -> None:
        self.folder = folder
        self.wreck: Wreck | None = None
        self._fails_at = fails_at
        self._failing_syncs = failing_syncs
        self._operations = 0
        self._syncs = 0
        self._inodes: dict[int, _Inode] = {}
        self._synced_names: dict[str, int] = {}
        self._real = {name: getattr(os, name) for name in _WATCHED}
        for name in _WATCHED:
            monkeypatch.setattr(os, name, getattr(self, f"_{name}"))

    def fail(self) -> Wreck:
        """Lose power now, if it was not lost before."""
        if self.wreck is None:
            names = self._names()
            self.wreck = Wreck(
                {number: (each.synced, each.content) for number, each in self._inodes.items()},
                {
                    path: (self._synced_names.get(path), names.get(path))
                    for path in {*names, *self._synced_names}
                },
            )
        return self.wreck

    def close(self) -> None:
        for each in self._inodes.values():
            os.close(each.fd)

    def _names(self) -> dict[str, int]:
        return {
            str(path.relative_to(self.folder)): self._inode_of(path)
            for path in self.folder.rglob("*")
            if path.is_file()
        }

    def _inode_of(self, path: Path) -> int:
        number = path.stat().st_ino
        if number not in self._inodes:
            # Kept open, so that its number is not given to another file. All of it may be new: a
            # file object does not write through the os module.
            inode = _Inode(self._real["open"](path, os.O_RDWR))
            inode.note(0, len(inode.content))
            self._inodes[number] = inode
        return number

    def _begin(self, fd: int | None = None) -> _Inode | None:
        """Count an operation; return the file that it is about, if that is one of ours."""
        if self._operations == self._fails_at:
            self.fail()
        self._operations += 1
        if fd is None:
            return None
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_file() and path.is_relative_to(self.folder):
            return self._inodes[self._inode_of(path)]
        return self._inodes.get(os.fstat(fd).st_ino)

    def _open(self, path: Any, *args: Any, **kwargs: Any) -> int:
        self._begin()
        return self._real["open"](path, *args, **kwargs)

    def _write(self, fd: int, content: Any) -> int:
        inode = self._begin(fd)
        start = 0 if inode is None else len(inode.content)
        count: int = self._real["write"](fd, content)
        if inode is not None:
            inode.note(start, start + count)  # All are appending.
        return count

    def _pwrite(self, fd: int, content: Any, at: int) -> int:
        inode = self._begin(fd)
        count: int = self._real["pwrite"](fd, content, at)
        if inode is not None:
            inode.note(at, at + count)
        return count

    def _ftruncate(self, fd: int, size_bytes: int) -> None:
        inode = self._begin(fd)
        self._real["ftruncate"](fd, size_bytes)
        if inode is not None and size_bytes % BLOCK_BYTES:
            inode.note(size_bytes - 1, size_bytes)

    def _fdatasync(self, fd: int) -> None:
        inode = self._begin(fd)
        if inode is None:
            return
        self._syncs += 1
        if self._syncs - 1 in self._failing_syncs:
            inode.unwritten.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        inode.sync()

    def _fsync(self, fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if not path.is_dir():
            return self._fdatasync(fd)
        self._begin()
        if path == self.folder or path.is_relative_to(self.folder):
            self._synced_names = {
                name: number
                for name, number in self._synced_names.items()
                if (self.folder / name).parent != path
            } | {
                name: number
                for name, number in self._names().items()
                if (self.folder / name).parent == path
            }
        return None

    def _replace(self, source: Any, target: Any) -> None:
        self._begin()
        self._inode_of(Path(source))
        self._real["replace"](source, target)

    def _unlink(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self._begin()
        self._real["unlink"](path, *args, **kwargs)


_WATCHED = ("open", "write", "pwrite", "ftruncate", "fdatasync", "fsync", "replace", "unlink")
