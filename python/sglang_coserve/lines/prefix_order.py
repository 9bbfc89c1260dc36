"""The order in which the lines of a job are served: common beginnings of prompts together."""

from __future__ import annotations

import logging
import os
from glob import escape
from pathlib import Path
from typing import BinaryIO, Final

from sglang_coserve.errors import StorageError
from sglang_coserve.lines.helper_process import run_module

__all__ = ["PrefixOrder"]

_MODULE: Final = "sglang_coserve.jsonl.prefix_order"

_log = logging.getLogger(__name__)


class PrefixOrder:
    """Found once for a job, by a process of its own, while its first lines are served.

    An engine orders what waits in it by itself, but of a long file it has only some hundred
    lines at a time.
    """

    def __init__(self, source: Path, path: Path, *, unique_ids: bool = False) -> None:
        """The order of ``source`` is to be at ``path``; see ``LineSource`` for ``unique_ids``."""
        self.path = path
        self._source = source
        self._unique_ids = unique_ids
        self._input: BinaryIO | None = None

    @property
    def read_share(self) -> float | None:
        """Part of the source that has been read to find it; None while nothing does."""
        if self._input is None:
            return None
        # The process shares the file, and so where in it they are.
        size_bytes = os.fstat(self._input.fileno()).st_size
        return min(1.0, self._input.tell() / max(1, size_bytes))

    async def find(self) -> None:
        """Have the order found, unless it is there.

        Where it cannot be found, the lines are served in the order of the file.
        """
        if self.path.exists():
            return
        arguments = [
            str(os.getpid()),
            str(self.path),
            *(["unique-ids"] if self._unique_ids else []),
        ]
        try:
            with self._source.open("rb", buffering=0) as self._input:
                await run_module(
                    f"ordering {self._source}", _MODULE, *arguments, source=self._input
                )
        except (StorageError, OSError) as error:
            _log.warning("lines are served in the order of the file: %s", error)
        finally:
            self._input = None

    def delete(self) -> None:
        """Delete what there is of it. Blocks."""
        self.path.unlink(missing_ok=True)
        for unfinished in self.path.parent.glob(f"{escape(self.path.name)}.*.part"):
            unfinished.unlink(missing_ok=True)
