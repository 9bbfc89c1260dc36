"""The owners of files and batches: hashes of API keys, with their bytes and files on the disk."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256

from sglang_coserve.batch.errors import QuotaError
from sglang_coserve.batch.store import Store, file_rows


def owner_of(api_key: str | None) -> str:
    """Return the owner behind an API key, one for all who need none.

    Keys are long and random, so a plain hash keeps them out of the database.
    """
    return sha256(api_key.encode()).hexdigest() if api_key else "everybody"


@dataclass(slots=True)
class _Use:
    """What an owner has, kept while uploads of it are under way."""

    uploads: int = 0
    stored_bytes: int = 0
    """Of files that exist: inputs, outputs and errors."""

    receiving_bytes: int = 0
    """Of those uploads."""


class Upload:
    """One upload that is under way."""

    def __init__(self, use: _Use, max_bytes: int | None) -> None:
        self._use = use
        self._max_bytes = max_bytes
        self.size_bytes = 0

    def count(self, size_bytes: int, free_bytes: int) -> None:
        """Count a piece that has been written; ``free_bytes`` of the disk are left.

        Raises:
            QuotaError: its owner now has more than allowed.
        """
        self.size_bytes += size_bytes
        self._use.receiving_bytes += size_bytes
        raise_if_over(
            self._use.stored_bytes + self._use.receiving_bytes, self._max_bytes, free_bytes
        )


class OwnerStorage:
    """Counts what is being received against what an owner may have, over all uploads at once.

    ``max_bytes`` is what each owner may have. None: as much as is then still free on the
    disk, so that one who takes all there is leaves half of it to the others.
    """

    def __init__(self, store: Store, max_bytes: int | None, max_files: int) -> None:
        self._store = store
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._uses: dict[str, _Use] = {}

    @asynccontextmanager
    async def upload(self, owner: str) -> AsyncGenerator[Upload]:
        """Enter for as long as an upload is no file yet.

        Raises:
            QuotaError: its owner has as many files as allowed.
            StorageError: the database cannot be read.
        """
        use = self._uses.setdefault(owner, _Use())
        use.uploads += 1
        uploads = use.uploads  # Before the files are counted: one that ends is in either.
        upload = Upload(use, self._max_bytes)
        try:
            use.stored_bytes, files = await self._store.run(file_rows.stored, owner)
            raise_if_too_many(files + uploads, self._max_files)
            yield upload
            if use.uploads > 1:
                use.stored_bytes, _ = await self._store.run(file_rows.stored, owner)
        finally:
            use.receiving_bytes -= upload.size_bytes
            use.uploads -= 1
            if not use.uploads:
                del self._uses[owner]


def raise_if_too_many(files: int, max_files: int) -> None:
    """Check how many files an owner would have.

    Raises:
        QuotaError: it is more than allowed.
    """
    if files > max_files:
        raise QuotaError(f"this key may have {max_files:,} files, results included: delete files")


def raise_if_over(used_bytes: int, max_bytes: int | None, free_bytes: int) -> None:
    """Check what an owner has.

    Raises:
        QuotaError: it is more than allowed.
    """
    limit_bytes = free_bytes if max_bytes is None else max_bytes
    if used_bytes <= limit_bytes:
        return
    allowed = "as much as is still free on the server's disk" if max_bytes is None else "allowed"
    raise QuotaError(
        f"this key has {used_bytes:,} bytes of files, and {limit_bytes:,} bytes are {allowed}:"
        " delete files"
    )
