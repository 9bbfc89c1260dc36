"""What a power failure may leave of files whose last bytes were not synced."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Final

FAULTS: Final = Path(__file__).parent / "disk_faults"
"""A folder for ``PYTHONPATH``: its sitecustomize.py notes syncs and lets them fail."""

_OF_SQLITE: Final = (".sqlite", "-wal", "-shm", "-journal")
"""Ends of names of files that SQLite syncs itself, unseen."""


class DiskFaults:
    """Of the files below a folder: which syncs fail, and what is torn off."""

    def __init__(self, data: Path, notes: Path, rng: random.Random) -> None:
        """``notes`` is a folder for what the server's processes note; it is made here."""
        self._data = data
        self._notes = notes
        self._rng = rng
        notes.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """What the server's processes need of the environment."""
        paths = [str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"CHAOS_DISK": str(self._notes), "PYTHONPATH": os.pathsep.join(paths)}

    def let_syncs_fail(self, fail: bool) -> None:
        """Let all syncs of files fail from now on, or no more."""
        mark = self._notes / "failing"
        if fail:
            mark.touch()
        else:
            mark.unlink()

    def tear(self) -> None:
        """Take unsynced tails off the files of a server that does not run.

        A tail is cut at a random byte, zeroed from there, or kept: the kernel had written it.
        """
        synced = self._synced_bytes()
        for path in self._data.rglob("*"):
            if not path.is_file() or path.name.endswith(_OF_SQLITE):
                continue
            found = path.stat()
            first = min(synced.get(found.st_ino, 0), found.st_size)
            fate = self._rng.choice(("cut", "zeroed", "kept"))
            if first == found.st_size or fate == "kept":
                continue
            end = self._rng.randint(first, found.st_size - 1)
            with path.open("r+b") as file:
                file.truncate(end)
                if fate == "zeroed":
                    file.truncate(found.st_size)

    def _synced_bytes(self) -> dict[int, int]:
        notes = self._notes / "synced"
        lines = notes.read_text().splitlines() if notes.exists() else []
        return {int(inode): int(size) for inode, size in (line.split() for line in lines)}
