"""The KV of requests on the host as files in a directory that engines share.

Threads write and read, for which nobody waits; whatever fails is computed again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch

from sglang_coserve.errors import UnsupportedError
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.srt.kv_moves.kv_directory import KvDirectory, KvFileError, is_kv_name

Req = Any

_THREADS: Final = 2
"""One may copy and check while the other waits for the disk."""

_SWEEP_INTERVAL_S: Final = 600.0

_SLOT_DIM: Final = -3
"""Of a host pool's buffer, (K and V,) layers, slots, heads, head size, the dimension of slots."""


_logger = logging.getLogger(__name__)


class KvJob:
    """Work that is under way, and may be given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_given_up = False
        self.has_succeeded: bool | None = None
        """None until it has ended."""

    @property
    def is_given_up(self) -> bool:
        """Whether nobody wants the result any more."""
        return self._is_given_up

    def give_up(self) -> None:
        """Let the result be nobody's; memory that was lent to the job is free afterwards."""
        with self._lock:
            self._is_given_up = True

    def with_memory(self, copy: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Return ``copy()``, which uses memory that was lent to the job; None if it was given up.

        ``copy`` must not wait for a disk: ``give_up`` waits for it.
        """
        with self._lock:
            return None if self._is_given_up else copy()


class KvFiles:
    """Writes host pages of one rank to files, and reads files into host pages.

    Its threads end with the process, however long a disk hangs.
    """

    def __init__(self, cache: Any, path: Path, background: TaskSupervisor) -> None:
        """``path`` is the directory, the same one for all engines; ``background`` runs the
        threads.

        Raises:
            UnsupportedError: keys and values of the model are not of one size.
        """
        rank, self.num_ranks = cache.rank_of_ranks()
        self._directory = KvDirectory(path, rank)
        pool = cache.host_pool
        self._host_kv = kv = pool.kv_buffer
        if not isinstance(kv, torch.Tensor):
            raise UnsupportedError(
                "--kv-move-dir needs a model whose keys and values are of one size: leave it out"
            )
        self._token_bytes = pool.size_per_token
        shape = ", ".join(map(str, (*kv.shape[:_SLOT_DIM], *kv.shape[_SLOT_DIM + 1 :])))
        self._kind = f"{kv.dtype} of ({shape}), {cache.page_size} tokens in a page, "
        self._kind += f"rank {rank} of {self.num_ranks}"
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for _ in range(_THREADS):
            background.start_thread("kv_moves", self._run)
        background.start_thread("kv_expiry", self._run_expiry)

    def begin_write(self, req: Req, slots: torch.Tensor, model: str) -> KvJob | None:
        """Begin to write the KV in ``slots`` of a request's first tokens; None if that is none.

        Its rid is the name of the file: who gives a rid that is none gets no file. ``model`` is
        whose KV it is.
        """
        if not len(slots) or not is_kv_name(req.rid):
            return None
        identity = self._identity(req, len(slots), model)
        return self._begin(partial(self._write, req.rid, identity, slots))

    def _write(self, name: str, identity: str, slots: torch.Tensor, job: KvJob) -> None:
        # In one operation: this thread waits for Python's lock after each.
        kv = job.with_memory(lambda: self._host_kv.index_select(_SLOT_DIM, slots))
        if kv is not None:
            kv = kv.view(-1).view(torch.uint8)
            self._directory.write(name, identity, kv, lambda: not job.is_given_up)

    def begin_read(self, name: str, req: Req, slots: torch.Tensor, model: str) -> KvJob:
        """Begin to read the KV of a request's first tokens into ``slots``."""
        identity = self._identity(req, len(slots), model)
        return self._begin(partial(self._read, name, identity, slots))

    def _read(self, name: str, identity: str, slots: torch.Tensor, job: KvJob) -> None:
        shape = list(self._host_kv.shape)
        shape[_SLOT_DIM] = len(slots)
        kv = self._directory.take(name, identity, len(slots) * self._token_bytes)
        kv = kv.view(self._host_kv.dtype).view(shape)
        job.with_memory(lambda: self._host_kv.index_copy_(_SLOT_DIM, slots, kv))

    def remove(self, name: str) -> None:
        """Begin to remove the file under ``name``, if there is one."""
        self._begin(lambda _: self._directory.remove(name))

    def _begin(self, work: Callable[[KvJob], None]) -> KvJob:
        """Call ``work`` in a thread; if it raises, the job has failed."""
        job = KvJob()

        def attempt() -> None:
            has_succeeded = False
            try:
                if not job.is_given_up:
                    work(job)
                    has_succeeded = True
            except KvFileError as error:
                _logger.warning("KV is computed again: %s", error)
            except Exception as error:
                _logger.warning("KV is not moved: %s: %s", type(error).__name__, error)
            job.has_succeeded = has_succeeded

        self._work.put(attempt)
        return job

    def _run(self) -> None:
        while True:
            self._work.get()()

    def _run_expiry(self) -> None:
        while True:
            self._directory.remove_expired()
            time.sleep(_SWEEP_INTERVAL_S)

    def _identity(self, req: Req, tokens: int, model: str) -> str:
        """Return what a file of the KV of a request's first tokens must be of."""
        digest = blake2b(f"{self._kind}; {model}; ".encode(), digest_size=16)
        digest.update(array("q", (req.origin_input_ids + req.output_ids)[:tokens]).tobytes())
        return digest.hexdigest()
