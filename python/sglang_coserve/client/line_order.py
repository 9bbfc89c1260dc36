"""The order in which the lines of a file are sent: common beginnings of prompts together."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from sglang_coserve.jsonl.prefix_order import OrderedLine, read_order

__all__ = ["LineOrder"]

_MODULE: Final = "sglang_coserve.jsonl.prefix_order"
_AT_ONCE: Final = 10_000

_log = logging.getLogger(__name__)


class LineOrder:
    """Found by a process of its own, beside the first lines, which are sent in the file's order.

    It is in a nameless file and gone with the run: the input may change until the next one.
    Where it cannot be found, a warning says so.
    """

    def __init__(self, source: Path) -> None:
        """The order of ``source``, which can be read; nothing happens yet."""
        self._source = source
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False
        self._input: BinaryIO | None = None
        self._entries: BinaryIO | None = None

    def begin(self) -> None:
        """Start to find it, once."""
        if self._process is not None or self._has_ended:
            return
        try:
            # Shared with the process, so its offset tells how far that is.
            self._input = self._source.open("rb", buffering=0)
            self._entries = tempfile.TemporaryFile()  # noqa: SIM115  (closed by ``close``)
            self._process = subprocess.Popen(
                (sys.executable, "-m", _MODULE, str(os.getpid())),
                stdin=self._input,
                stdout=self._entries,
                stderr=subprocess.PIPE,  # A traceback at most, which a pipe can hold.
                # An interrupt from the terminal is for the client to handle.
                start_new_session=True,
            )
        except OSError as error:
            self._has_ended = True
            _log.warning("lines are sent in the order of the file: %s", error.strerror)

    @property
    def read_share(self) -> float | None:
        """Part of the input that has been read to find it; None while nothing does."""
        if self._process is None or self._has_ended or self._input is None:
            return None
        size_bytes = os.fstat(self._input.fileno()).st_size
        return min(1.0, self._input.tell() / max(1, size_bytes))

    def is_found(self) -> bool:
        """Return True once: when the process has just found it."""
        if self._process is None or self._has_ended:
            return False
        status = self._process.poll()
        if status is None:
            return False
        self._has_ended = True
        if status and self._process.stderr is not None:
            said = self._process.stderr.read().decode(errors="replace").strip().splitlines()
            _log.warning(
                "lines are sent in the order of the file: ordering it ended with %d: %s",
                *(status, (said or ["no message"])[-1]),
            )
        return status == 0

    def entries(self) -> Iterator[OrderedLine]:
        """Yield where the lines are, in the order that was found."""
        assert self._entries is not None, "entries() before is_found()"
        start = 0
        while entries := read_order(self._entries, start, _AT_ONCE):
            yield from entries
            start += len(entries)

    def close(self) -> None:
        """End the process, if it runs, and forget the order."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._has_ended = True
        for file in (self._input, self._entries):
            if file is not None:
                file.close()
