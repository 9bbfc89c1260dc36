"""The order in which the lines of a batch are served: common beginnings of prompts together."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from sglang_coserve.batch.errors import StorageError
from sglang_coserve.batch.helper_process import run_module

__all__ = ["PrefixOrder"]

_MODULE: Final = "sglang_coserve.jsonl.prefix_order"

_log = logging.getLogger(__name__)


class PrefixOrder:
    """Found once for a batch, by a process of its own, while its first lines are served.

    The engine orders what waits in it by itself, but of a long file it has only some hundred
    lines at a time.
    """

    def __init__(self, source: Path, path: Path, max_in_flight: int) -> None:
        """The order of ``source`` is to be at ``path``; the engine has so many lines at a time."""
        self.path = path
        self._source = source
        self._max_in_flight = max_in_flight

    async def find(self, num_lines: int) -> None:
        """Have the order found, unless it is there or the engine has all lines at once.

        Where it cannot be found, the lines are served in the order of the file.
        """
        if num_lines <= self._max_in_flight or self.path.exists():
            return
        arguments = (str(os.getpid()), str(self._source), str(self.path))
        try:
            await run_module(f"ordering {self._source}", _MODULE, *arguments)
        except StorageError as error:
            _log.warning("lines are served in the order of the file: %s", error)

    def delete(self) -> None:
        """Delete what there is of it. Blocks."""
        self.path.unlink(missing_ok=True)
        for unfinished in self.path.parent.glob(f"{self.path.name}.*.part"):
            unfinished.unlink(missing_ok=True)
