"""The KV of requests on the host as files in a directory that engines share.

Nothing here waits: threads write and read, and whatever fails is computed again.
"""

from __future__ import annotations

from array import array
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch

from sglang_coserve.errors import UnsupportedError
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.srt.kv_checkpoint.kv_directory import KvDirectory, KvJob, KvThreads, is_kv_name

Req = Any

_SWEEP_INTERVAL_S: Final = 600.0

_SLOT_DIM: Final = -3
"""Of a host pool's buffer, (K and V,) layers, slots, heads, head size, the dimension of slots."""


class KvFiles:
    """Writes host pages of one rank to files, and reads files into host pages."""

    def __init__(self, cache: Any, path: Path, background: TaskSupervisor) -> None:
        """``path`` is the directory, the same one for all engines; ``background`` runs the
        threads.

        Raises:
            UnsupportedError: keys and values of the model are not of one size.
        """
        rank, self.num_ranks = cache.rank_of_ranks()
        self._directory = directory = KvDirectory(path, rank)
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
        self._threads = KvThreads(background, directory.remove_expired, _SWEEP_INTERVAL_S)

    def begin_write(self, req: Req, slots: torch.Tensor, model: str) -> KvJob | None:
        """Begin to write the KV in ``slots`` of a request's first tokens; None if that is none.

        Its rid is the name of the file: who gives a rid that is none gets no file. ``model`` is
        whose KV it is.
        """
        if not len(slots) or not is_kv_name(req.rid):
            return None
        identity = self._identity(req, len(slots), model)
        return self._threads.begin(partial(self._write, req.rid, identity, slots))

    def _write(self, name: str, identity: str, slots: torch.Tensor, job: KvJob) -> None:
        found: list[torch.Tensor] = []

        def copy() -> None:
            # In one operation: this thread waits for Python's lock after each.
            found.append(self._host_kv.index_select(_SLOT_DIM, slots))

        if job.with_memory(copy):
            kv = found[0].view(-1).view(torch.uint8)
            self._directory.write(name, identity, kv, lambda: not job.is_given_up)

    def begin_read(self, name: str, req: Req, slots: torch.Tensor, model: str) -> KvJob:
        """Begin to read the KV of a request's first tokens into ``slots``."""
        identity = self._identity(req, len(slots), model)
        return self._threads.begin(partial(self._read, name, identity, slots))

    def _read(self, name: str, identity: str, slots: torch.Tensor, job: KvJob) -> None:
        shape = list(self._host_kv.shape)
        shape[_SLOT_DIM] = len(slots)
        kv = self._directory.take(name, identity, len(slots) * self._token_bytes)
        kv = kv.view(self._host_kv.dtype).view(shape)

        def copy() -> None:
            self._host_kv.index_copy_(_SLOT_DIM, slots, kv)

        job.with_memory(copy)

    def remove(self, name: str) -> None:
        """Begin to remove the file under ``name``, if there is one."""
        self._threads.begin(lambda _: self._directory.remove(name))

    def _identity(self, req: Req, tokens: int, model: str) -> str:
        """Return what a file of the KV of a request's first tokens must be of."""
        digest = blake2b(f"{self._kind}; {model}; ".encode(), digest_size=16)
        digest.update(array("q", (req.origin_input_ids + req.output_ids)[:tokens]).tobytes())
        return digest.hexdigest()
