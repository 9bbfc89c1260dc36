"""Orders the lines of a job so that common prefixes of prompts come together."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import BinaryIO, Final

from sglang_coserve.durable_files import discard_unfinished
from sglang_coserve.errors import StorageError
from sglang_coserve.jsonl.prefix_order import has_order
from sglang_coserve.lines.helper_process import run_module

__all__ = ["PrefixOrder"]

_MODULE: Final = "sglang_coserve.jsonl.prefix_order"

_log = logging.getLogger(__name__)


class PrefixOrder:
    """Computes the prefix order of a job once, in a separate process, while its first lines run.

    An engine itself orders the requests that wait in it, but of a long file it has only a few
    hundred lines at a time.
    """

    def __init__(self, source: Path, path: Path, *, unique_ids: bool = False) -> None:
        """``path`` will have the order of ``source``; see ``LineSource`` for ``unique_ids``."""
        self.path = path
        self._source = source
        self._unique_ids = unique_ids
        self._input: BinaryIO | None = None

    @property
    def read_share(self) -> float | None:
        """Share of the source that has been read so far; None while the process is not running."""
        if self._input is None:
            return None
        # The process shares the file description, and so its offset.
        size_bytes = os.fstat(self._input.fileno()).st_size
        return min(1.0, self._input.tell() / max(1, size_bytes))

    async def find(self) -> None:
        """Compute the order, unless a whole one exists.

        If that fails, the lines are served in the order of the file.
        """
        if await asyncio.to_thread(has_order, self.path):
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
        """Delete the order and unfinished parts of it. Blocks."""
        self.path.unlink(missing_ok=True)
        discard_unfinished(self.path)
