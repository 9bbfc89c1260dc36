"""Stores files atomically; uploads and downloads are streamed, few at a time and not too fast."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from sglang_coserve.batch.context import JobContext, new_id
from sglang_coserve.batch.errors import ConflictError, NotFoundError, TooLargeError, TooManyError
from sglang_coserve.batch.record import FileRecord
from sglang_coserve.batch.schemas import ExpiresAfter
from sglang_coserve.batch.store import file_rows
from sglang_coserve.durable_files import write_all
from sglang_coserve.errors import StorageError, disk_errors
from sglang_coserve.lines.fair_slots import FairSlots, JobShare


class Transfers:
    """Bounds transfers, or their bytes, at the same time. An owner may hold at most as many as are
    still free."""

    def __init__(self, kind: str, most: int) -> None:
        self._kind = kind
        self._most = most
        self._by_owner: Counter[str] = Counter()
        self._of: set[tuple[str, str]] = set()
        """Owners and objects of which there may be one transfer at a time."""

    @property
    def count(self) -> int:
        """Number of transfers, or of their bytes, at this time."""
        return self._by_owner.total()

    @contextmanager
    def one(self, owner: str, of: str | None = None) -> Generator[None]:
        """Enter for as long as a transfer of ``owner`` takes; ``of`` has one at a time.

        Raises:
            TooManyError: there are too many, of this owner or of all.
            ConflictError: there is one of ``of``.
        """
        if (owner, of) in self._of:
            raise ConflictError(
                f"another call works on {of!r}: wait for its answer", code="in_progress"
            )
        with self.growing(owner) as take:
            take(1)
            if of is None:
                yield
                return
            self._of.add((owner, of))
            try:
                yield
            finally:
                self._of.remove((owner, of))

    @contextmanager
    def growing(self, owner: str) -> Generator[Callable[[int], None]]:
        """Yield what is called to take more; all of it is given back at the end.

        It raises ``TooManyError`` where too many are taken, by this owner or by all.
        """
        taken = 0

        def take(number: int) -> None:
            nonlocal taken
            count, free = self._by_owner[owner], self._most - self.count
            if count + number > free:
                raise TooManyError(
                    f"{count} {self._kind} of this key are under way, and {free} more could be of "
                    "all keys: wait until one is done",
                    code=f"too_many_{self._kind}".replace(" ", "_"),
                )
            taken += number
            self._by_owner[owner] += number

        try:
            yield take
        finally:
            self._by_owner[owner] -= taken
            self._by_owner += Counter()  # Owners without transfers are removed.


_PIECE_BYTES: Final = 1 << 18
_EXPIRED_AT_ONCE: Final = 100


@dataclass(slots=True)
class _Use:
    """What an owner has, kept while uploads of it are under way."""

    uploads: int = 0
    stored_bytes: int = 0
    """Of files that exist: inputs, outputs and errors."""

    receiving_bytes: int = 0
    """Of those uploads."""


class FileStore:
    """Adds, reads and deletes files. Raises ``StorageError`` when the disk is full or failing."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._directory = context.directory
        self._store = context.store
        self._threads = context.threads
        self._limits = context.limits
        self._turns = FairSlots(1, max_bytes=1)
        """Turns of the pieces of uploads: owners get equal shares of the bytes."""

        self._uses: dict[str, _Use] = {}

    async def settle(self) -> None:
        """Clean up after a crash. Call it once, before anything else."""
        await self._store.run(self._settle)

    async def add_input(
        self,
        owner: str,
        filename: str,
        chunks: AsyncIterable[bytes],
        expires_after: Callable[[], ExpiresAfter | None],
    ) -> FileRecord:
        """Store what a batch may be made of; see ``add``."""

        def expires_at_s(now_s: float) -> float:
            after = expires_after()
            return now_s + (after.seconds if after else self._limits.input_retention_s)

        file_id = new_id("file-", self._context.rng)
        return await self.add(owner, file_id, "batch", filename, chunks, expires_at_s)

    async def add(
        self,
        owner: str,
        file_id: str,
        purpose: str,
        filename: str,
        chunks: AsyncIterable[bytes],
        expires_at_s: Callable[[float], float | None],
    ) -> FileRecord:
        """Store what comes, and force it to the disk. On failure nothing of it stays.

        ``expires_at_s`` is asked after the last chunk, with the time of creation.

        Raises:
            TooLargeError: it is longer than ``max_upload_bytes``.
            QuotaError: its owner has too much on the disk.
        """
        async with self._counted(owner) as count:
            try:
                size_bytes = await self._receive(owner, file_id, chunks, count)
                now_s = self._context.clock.now_s()
                file = FileRecord(
                    id=file_id,
                    owner=owner,
                    filename=filename,
                    purpose=purpose,
                    size_bytes=size_bytes,
                    created_at_s=now_s,
                    expires_at_s=expires_at_s(now_s),
                )
            except BaseException:
                await self._threads.run(self._directory.discard, file_id)
                raise
            try:
                await self._store.run(file_rows.insert, file)
            except StorageError:  # Not if the caller was cancelled: the row is there then.
                await self._threads.run(self._directory.discard, file_id)
                raise
            await self._threads.run(self._directory.confirm, file_id)
        return file

    @asynccontextmanager
    async def _counted(self, owner: str) -> AsyncGenerator[Callable[[int, int], None]]:
        """Enter for as long as an upload is no file yet: all uploads of an owner count together.

        Yields what is called with the bytes that were written, and those that are then free.
        """
        use = self._uses.setdefault(owner, _Use())
        use.uploads += 1
        uploads = use.uploads  # Before the files are counted: one that ends is in either.
        size_bytes = files = 0

        def count(written_bytes: int, free_bytes: int) -> None:
            nonlocal size_bytes
            size_bytes += written_bytes
            use.receiving_bytes += written_bytes
            used_bytes = use.stored_bytes + use.receiving_bytes
            self._limits.check_stored(used_bytes, files + uploads, free_bytes)

        try:
            use.stored_bytes, files = await self._store.run(file_rows.stored, owner)
            count(0, await self._threads.run(self._free_bytes))
            yield count
            if use.uploads > 1:
                use.stored_bytes, _ = await self._store.run(file_rows.stored, owner)
        finally:
            use.receiving_bytes -= size_bytes
            use.uploads -= 1
            if not use.uploads:
                del self._uses[owner]

    async def _receive(
        self,
        owner: str,
        file_id: str,
        chunks: AsyncIterable[bytes],
        count: Callable[[int, int], None],
    ) -> int:
        """Return the bytes that were received."""
        limit_bytes, size_bytes = self._limits.max_upload_bytes, 0
        # Open until it is synced: an error of writing may be told only to who had it open.
        with ExitStack() as opened:
            fd = await self._threads.run(self._begin, file_id, opened)
            async for piece in _in_pieces(chunks):
                size_bytes += len(piece)
                if size_bytes > limit_bytes:
                    raise TooLargeError(
                        f"the file is larger than {limit_bytes:,} bytes: split it",
                        code="file_too_large",
                        param="file",
                    )
                count(len(piece), await self._threads.run(self._append, fd, piece))
                await self._slowed(owner, len(piece))
            await self._threads.run(self._force, fd)
        return size_bytes

    async def _slowed(self, owner: str, size_bytes: int) -> None:
        """Hold all uploads together to ``busy_upload_bytes_per_s`` beside online requests.

        Each piece takes time of the event loop and the interpreter lock that online requests are
        read, tokenized and answered with. What is not read waits in the client, by TCP's flow
        control.
        """
        async with self._turns.one(JobShare(owner, 0, 0.0), size_bytes):
            if self._context.backend.load().is_online_busy:
                await self._context.clock.sleep(size_bytes / self._limits.busy_upload_bytes_per_s)

    async def read(self, file_id: str, start: int, end: int) -> AsyncGenerator[bytes]:
        """Yield the bytes [``start``, ``end``) of a file.

        Raises:
            NotFoundError: it has been deleted meanwhile.
            StorageError: it is shorter than that, or cannot be read.
        """
        with ExitStack() as opened:
            fd = await self._threads.run(self._open, file_id, opened)
            while start < end:
                size_bytes = min(_PIECE_BYTES, end - start)
                with disk_errors(f"file {file_id} cannot be read"):
                    piece = await self._threads.run(os.pread, fd, size_bytes, start)
                if not piece:
                    raise StorageError(f"file {file_id} has been cut off at byte {start}")
                start += len(piece)
                yield piece

    async def remove(self, owner: str, file_id: str) -> None:
        """Delete a file.

        Raises:
            NotFoundError, ConflictError: see ``file_rows.delete``.
            StorageError: the disk is failing.
        """
        await self._store.run(self._delete, owner, file_id)
        await self._threads.run(self._directory.discard, file_id)

    async def remove_expired(self, now_s: float) -> None:
        """Delete expired files, except those that a batch needs."""
        while expired := await self._store.run(file_rows.expired, now_s, _EXPIRED_AT_ONCE):
            for owner, file_id in expired:
                # Its owner may have been faster, or has begun a batch with it meanwhile.
                with suppress(NotFoundError, ConflictError):
                    await self.remove(owner, file_id)

    def _settle(self, connection: sqlite3.Connection) -> None:
        self._directory.settle(partial(file_rows.exists, connection))

    def _delete(self, connection: sqlite3.Connection, owner: str, file_id: str) -> None:
        file_rows.delete(connection, owner, file_id)
        # Before the transaction ends: from its end on the bytes are there without a row.
        self._directory.mark_in_doubt(file_id)

    # The stacks have the files before anybody waits for a thread: who is cancelled closes them.

    def _open(self, file_id: str, opened: ExitStack) -> int:
        with disk_errors(f"file {file_id} cannot be read"):
            try:
                fd = os.open(self._directory.file(file_id), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise NotFoundError(
                    f"no such file: {file_id!r}", code="file_not_found", param="file_id"
                ) from None
        opened.callback(os.close, fd)
        return fd

    def _begin(self, file_id: str, opened: ExitStack) -> int:
        with disk_errors("the upload cannot be written"):
            self._directory.mark_in_doubt(file_id)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(self._directory.file(file_id), flags, 0o600)
        opened.callback(os.close, fd)
        return fd

    def _append(self, fd: int, piece: bytes) -> int:
        """Return the room that is then left on the disk."""
        with disk_errors("the upload cannot be written"):
            write_all(fd, piece)
        return self._free_bytes()

    def _free_bytes(self) -> int:
        return self._directory.free_bytes(self._limits.min_free_bytes)

    def _force(self, fd: int) -> None:
        with disk_errors("the upload cannot be written"):
            os.fdatasync(fd)
            self._directory.sync_files()


async def once(content: bytes) -> AsyncGenerator[bytes]:
    """Yield ``content``: a file of which all is there."""
    yield content


async def _in_pieces(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """Yield the same bytes in larger pieces, at least one, as each is written by a call of a
    thread."""
    buffer = bytearray()
    async for chunk in chunks:
        buffer += chunk
        if len(buffer) >= _PIECE_BYTES:
            yield bytes(buffer)
            buffer.clear()
    yield bytes(buffer)
