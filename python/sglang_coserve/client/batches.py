"""The calls that a job makes, wherever its batch is kept: on a server, or in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

Batch: TypeAlias = Mapping[str, Any]
"""A batch as the Batch API shows it: OpenAI's object, with ``coserve`` beside."""

FINAL_STATUSES: Final = frozenset({"completed", "failed", "expired", "cancelled"})


class Batches(Protocol):
    """Keeps files and batches: ``BatchApi`` on a server, ``LocalBatches`` in this process.

    Methods raise ``RefusedError`` when the call is wrong, ``InputFileError`` when a local file
    cannot be used, and ``ServerError`` when the server cannot go on.
    """

    is_local: bool
    """True where batches stand still while nobody has opened them."""

    default_window: str
    """The window of a batch for which none is given."""

    @property
    def last_failure(self) -> str | None:
        """Why the server is called again; None while it answers."""

    async def upload(self, source: Path) -> str:
        """Take a copy of a file; return the id of the copy."""

    async def create(
        self, file_id: str, endpoint: str, window: str, key: str, options: Mapping[str, Any]
    ) -> Batch:
        """Begin a batch with these ``coserve`` options; the same ``key`` again returns the same
        batch."""

    async def retrieve(self, batch_id: str) -> Batch:
        """Return a batch."""

    async def fetch(self, file_id: str, path: Path) -> None:
        """Append the bytes of a file that ``path`` lacks, and force them to the disk.

        The file may still grow. What a crash can have damaged at the end of ``path`` must have
        been cut off, by ``cut_unsynced``.
        """

    async def delete(self, file_id: str) -> None:
        """Delete a file."""

    async def wait(self, seconds: float) -> None:
        """Wait until the next look at a batch.

        Raises:
            ServerError: no line of it can be served any more.
        """

    async def stop(self) -> None:
        """Serve no more lines, where this process serves them; what is finished can be fetched."""
