"""The limits of the Batch API: sizes, numbers, attempts and times."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Self

from sglang_coserve.batch.errors import QuotaError
from sglang_coserve.config import BatchApiConfig
from sglang_coserve.durations import LONGEST_WINDOW_S
from sglang_coserve.errors import ConfigError, StorageError

_MIB = 1 << 20
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of the Batch API.

    Raises:
        ConfigError: a value is not a positive number.
    """

    max_upload_bytes: int = 200 * _MIB
    """Size of one input file."""

    busy_upload_bytes_per_s: int = 16 * _MIB
    """How fast all uploads together are read while online requests are being served."""

    max_lines: int = 50_000
    """Requests in one input file."""

    max_reported_errors: int = 100
    """Validation stops after this many offending lines."""

    max_active_batches: int = 256
    """Batches that are not in a final state, over all owners."""

    max_active_batches_per_owner: int | None = None
    """Those of one owner; None: as many as are still free. So one who takes all there are has
    half of them, two have a third each, and there always are some for the next."""

    max_active_responses: int = 2048
    """Background responses that have not ended, over all owners; one may have as many as are still
    free. Each is a job with a task of its own."""

    batch_retention_s: float = 30 * _DAY_S
    """When a batch is forgotten, counted from its end. Its files stay."""

    max_ended_batches_per_owner: int = 100_000
    """Most ended batches and responses of an owner together. The oldest ones are forgotten."""

    max_ended_bytes_per_owner: int = 256 * _MIB
    """Most bytes of the rows of these: metadata, faults, and the fields that a response repeats."""

    response_retention_s: float = 7 * _DAY_S
    """When a response is deleted, counted from its end."""

    max_stored_bytes_per_owner: int | None = None
    """Most bytes of the files of one owner. None allows as much as is still free on the disk.
    Results of lines in flight may exceed the limit, so that none is lost. Other lines of the owner
    wait."""

    max_files_per_owner: int = 100_000
    """Inputs and results together: an empty file takes no bytes, but a row and an inode. What an
    owner has is summed up at each upload, which takes some 10 ms for so many."""

    max_transfers: int = 256
    """Uploads, and as many downloads, at the same time: each takes a socket, and up to half a MiB
    of memory. One owner may have as many as are still free."""

    transfer_idle_s: float = 60.0
    """How long a client may neither send nor take anything of a file."""

    min_transfer_bytes_per_s: int = 1024
    """A client that is slower than that over a whole file, but for ``transfer_idle_s``, is given
    up: a byte a minute would hold a place for years."""

    max_window_s: float = LONGEST_WINDOW_S
    """Longest ``completion_window``."""

    max_in_flight: int = 512
    """Lines that the engine has at the same time, over all batches."""

    max_in_flight_bytes: int = 64 * _MIB
    """Their bytes in the input, for each engine; a single larger line is sent alone."""

    max_attempts: int = 5
    """Times that one line is tried when the engine fails on it."""

    flush_interval_s: float = 0.05
    """How long a result may wait for others to be written with it."""

    journal_interval_s: float = 0.25
    """Interval at which generated tokens are written to the journal: what a crash can cost."""

    journal_compact_bytes: int = 64 * _MIB
    """Size above which a journal is rewritten without the lines that are finished."""

    input_retention_s: float = 30 * _DAY_S
    """When an upload expires that names no expiry of its own."""

    journal_free_bytes: int = 128 * _MIB
    """Journals do not grow while less of the disk would be free."""

    min_free_bytes: int = 64 * _MIB
    """Uploads and batches are refused while less of the disk is free."""

    tight_free_bytes: int = 256 * _MIB
    """Batches of owners without a quota, who have more on the disk than is free, wait while less is
    free: before anybody's uploads and batches are refused."""

    reserved_bytes: int = 16 * _MIB
    """Journals are deleted, and then running batches wait, while less is free: to cancel one, or to
    delete a file, takes some room in the database."""

    @classmethod
    def of(cls, config: BatchApiConfig) -> Self:
        """Return the limits that ``config`` sets, and the defaults of the others."""
        stored_gib = config.batch_max_stored_gib_per_key
        return cls(
            max_upload_bytes=config.batch_max_upload_mib << 20,
            max_lines=config.batch_max_lines,
            max_in_flight=config.batch_max_in_flight,
            max_in_flight_bytes=config.batch_max_in_flight_mib << 20,
            max_active_batches=config.batch_max_active,
            max_active_batches_per_owner=config.batch_max_active_per_key,
            max_stored_bytes_per_owner=None if stored_gib is None else int(stored_gib * (1 << 30)),
            max_files_per_owner=config.batch_max_files_per_key,
        )

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{field.name} must be greater than 0, not {value}")

    def quota_bytes(self, free_bytes: int) -> int | None:
        """Return the bytes of files with which an owner's batches go on; None for no limit.

        ``free_bytes`` are left on the disk.
        """
        if self.max_stored_bytes_per_owner is None and free_bytes < self.tight_free_bytes:
            return free_bytes
        return self.max_stored_bytes_per_owner

    def check_stored(self, used_bytes: int, files: int, free_bytes: int) -> None:
        """Check what an owner has on a disk of which ``free_bytes`` are left.

        Raises:
            StorageError: the disk is full.
            QuotaError: it is more than allowed.
        """
        if free_bytes < self.min_free_bytes:
            raise StorageError(
                "the server's disk is full: cancel a batch or delete files, or wait until others"
                " have expired"
            )
        if files > self.max_files_per_owner:
            raise QuotaError(
                f"this key may have {self.max_files_per_owner:,} files, results included:"
                " cancel a batch or delete files"
            )
        limit_bytes, allowed = self.max_stored_bytes_per_owner, "allowed"
        if limit_bytes is None:
            limit_bytes, allowed = free_bytes, "as much as is still free on the server's disk"
        if used_bytes > limit_bytes:
            raise QuotaError(
                f"this key has {used_bytes:,} bytes of files, and {limit_bytes:,} bytes are"
                f" {allowed}: cancel a batch or delete files"
            )
