"""KV that moves from engine to engine with its request, through a directory that they share.

The engine that gives a request back writes its saved pages to a file, and says that it has gone
when the file is there. The one that takes the request reads the file into host memory, as if it
had retracted the request itself. Nothing here waits: whatever is not done in time, or fails on
one rank, is computed again.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from sglang_coserve.errors import UnsupportedError
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.srt.kv_checkpoint.kv_directory import KvDirectory, KvJob, KvThreads, is_kv_name

Req = Any

_SWEEP_INTERVAL_S: Final = 600.0

_SLOT_DIM: Final = -3
"""Of a host pool's buffer, (K and V,) layers, slots, heads, head size, the dimension of slots."""

_PENDING: Final = -1
_GIVEN_UP: Final = -2
"""What a rank says of a move; otherwise the tokens that it has moved. The least counts."""


class KvLocation(NamedTuple):
    """Where the KV of a request's first tokens is."""

    name: str
    tokens: int

    model: str
    """Whose KV it is."""


class Left(NamedTuple):
    """A request that has left."""

    req: Req
    tokens: int
    """Whose KV is in the directory; 0: none."""


@dataclass(slots=True)
class _Leaving:
    req: Req
    model: str
    since_s: float
    host_slots: torch.Tensor | None = None
    """None while pages are still copied to the host."""
    job: KvJob | None = None


@dataclass(slots=True)
class _Coming:
    req: Req
    moved: KvLocation
    since_s: float
    job: KvJob


class KvMoves:
    """The requests that are about to leave, and those that have come and do not wait yet.

    They are the same, in the same order, on all ranks. The methods are to be called at the same
    point of the same scheduling round by all of them.
    """

    timeout_s = 10.0
    """Longest that a request waits for its KV, on each of the two engines. It is more than a disk
    takes for some GB; what a hanging one delays is computed again."""

    def __init__(
        self,
        cache: Any,
        path: Path,
        background: TaskSupervisor,
    ) -> None:
        """``path`` is the directory, the same one for all engines; ``background`` runs the
        threads."""
        rank, num_ranks = cache.rank_of_ranks()
        self._cache = cache
        self._num_ranks = num_ranks
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
        self._kind += f"rank {rank} of {num_ranks}"
        self._threads = KvThreads(background, directory.remove_expired, _SWEEP_INTERVAL_S)
        self._leaving: dict[str, _Leaving] = {}
        self._coming: dict[str, _Coming] = {}
        self._counts: Counter[str] = cache.counts

    def __len__(self) -> int:
        return len(self._leaving) + len(self._coming)

    def reqs(self) -> list[Req]:
        """Return these requests."""
        leaving, coming = self._leaving.values(), self._coming.values()
        return [*(each.req for each in leaving), *(each.req for each in coming)]

    # --- Away from here ------------------------------------------------------------------

    def leave(self, req: Req, model: str) -> None:
        """Begin to write the KV of a request that was released and waits nowhere any more.

        Its rid is the name of the file: who gives a rid that is none gets no file.
        """
        self._cache.copy_to_host(req)
        self._leaving[req.rid] = _Leaving(req, model, time.monotonic())

    def _write(self, each: _Leaving) -> None:
        """Begin to write a request's pages once all of them are on the host."""
        slots = self._cache.saved_slots(each.req)
        if slots is None:
            return
        each.host_slots = slots
        if not len(slots) or not is_kv_name(each.req.rid):
            return
        identity = self._identity(each.req, len(slots), each.model)
        each.job = self._threads.begin(partial(self._write_file, each.req.rid, identity, slots))

    def _write_file(self, name: str, identity: str, slots: torch.Tensor, job: KvJob) -> None:
        found: list[torch.Tensor] = []

        def copy() -> None:
            # In one operation: this thread waits for Python's lock after each.
            found.append(self._host_kv.index_select(_SLOT_DIM, slots))

        if job.with_memory(copy):
            kv = found[0].view(-1).view(torch.uint8)
            self._directory.write(name, identity, kv, lambda: not job.is_given_up)

    # --- From elsewhere ------------------------------------------------------------------

    def come(self, req: Req, moved: KvLocation) -> bool:
        """Begin to read the KV of a request that has just arrived; False if there is no room."""
        tokens, page = moved.tokens, self._cache.page_size
        has_tokens = 0 < tokens <= len(req.origin_input_ids) + len(req.output_ids)
        if not has_tokens or tokens % page or not is_kv_name(moved.name):
            return False
        slots = self._cache.expect(req.rid, tokens)
        if slots is None:
            return False
        identity = self._identity(req, tokens, moved.model)
        job = self._threads.begin(partial(self._read_file, moved.name, identity, slots))
        self._coming[req.rid] = _Coming(req, moved, time.monotonic(), job)
        return True

    def _read_file(self, name: str, identity: str, slots: torch.Tensor, job: KvJob) -> None:
        shape = list(self._host_kv.shape)
        shape[_SLOT_DIM] = len(slots)
        kv = self._directory.take(name, identity, len(slots) * self._token_bytes)
        kv = kv.view(self._host_kv.dtype).view(shape)

        def copy() -> None:
            self._host_kv.index_copy_(_SLOT_DIM, slots, kv)

        job.with_memory(copy)

    # --- Both ----------------------------------------------------------------------------

    def step(self) -> tuple[list[Left], list[Req]]:
        """Return the requests that have left, and those that are to wait for admission now."""
        if not len(self):
            return [], []
        for each in self._leaving.values():
            if each.host_slots is None:
                self._write(each)
        leaving, coming = list(self._leaving.values()), list(self._coming.values())
        tokens = [*map(self._left, leaving), *map(self._come, coming)]
        if self._num_ranks > 1:
            tokens = self._cache.least_of_ranks(tokens)
        left = [
            self._end_leaving(each, moved)
            for each, moved in zip(leaving, tokens[: len(leaving)], strict=True)
            if moved != _PENDING
        ]
        came = [
            self._end_coming(each, moved)
            for each, moved in zip(coming, tokens[len(leaving) :], strict=True)
            if moved != _PENDING
        ]
        return left, came

    def _left(self, each: _Leaving) -> int:
        if each.host_slots is None:
            return self._undecided(each.since_s)
        if each.job is None:
            return 0
        return self._said(each.job, len(each.host_slots), each.since_s)

    def _come(self, each: _Coming) -> int:
        return self._said(each.job, each.moved.tokens, each.since_s)

    def _said(self, job: KvJob, tokens: int, since_s: float) -> int:
        if job.has_succeeded is None:
            return self._undecided(since_s)
        return tokens if job.has_succeeded else 0

    def _undecided(self, since_s: float) -> int:
        return _GIVEN_UP if time.monotonic() - since_s > self.timeout_s else _PENDING

    def _end_leaving(self, each: _Leaving, tokens: int) -> Left:
        del self._leaving[each.req.rid]
        if tokens <= 0 and each.job is not None:
            self._discard(each)
        tokens = max(tokens, 0)
        self._counts["moved_out_tokens"] += tokens
        self._counts["moves_without_kv"] += not tokens
        return Left(each.req, tokens)

    def _discard(self, each: _Leaving) -> None:
        assert each.job is not None
        each.job.give_up()
        self._threads.begin(lambda _: self._directory.remove(each.req.rid))

    def _end_coming(self, each: _Coming, tokens: int) -> Req:
        del self._coming[each.req.rid]
        tokens = max(tokens, 0)
        each.job.give_up()
        self._cache.arrived(each.req, has_kv=tokens > 0)
        self._counts["moved_in_tokens"] += tokens
        self._counts["moves_without_kv"] += not tokens
        return each.req

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Take out and return the requests that match: they are aborted."""
        gone = []
        for each in [each for each in self._leaving.values() if matches(each.req)]:
            del self._leaving[each.req.rid]
            if each.job is not None:
                self._discard(each)
            gone.append(each.req)
        coming = [each for each in self._coming.values() if matches(each.req)]
        return gone + [self._end_coming(each, 0) for each in coming]

    def _identity(self, req: Req, tokens: int, model: str) -> str:
        """Return what a file of the KV of a request's first tokens must be of."""
        digest = blake2b(f"{self._kind}; {model}; ".encode(), digest_size=16)
        digest.update(array("q", (req.origin_input_ids + req.output_ids)[:tokens]).tobytes())
        return digest.hexdigest()
