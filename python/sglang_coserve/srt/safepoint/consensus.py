"""The gates of tensor-parallel ranks: rank 0 decides, and all stop before the same layer.

A rank that stopped alone would leave the others in a collective for ever. ConServe
broadcasts at every safepoint; here rank 0 writes how far it has come, and whether it goes
on, to memory that all ranks of a machine share, and the others wait until it has come as
far. One direction is enough: up to that layer all ranks have run the same collectives,
so rank 0 is never more than one safepoint ahead.

The words are written in order, and read in the opposite order. That relies on a
processor which does not reorder stores (x86), as any shared memory without barriers does.
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch

from sglang_coserve.srt.safepoint.flag import PreemptionFlag
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted

__all__ = ["FollowerGate", "LeaderGate", "SharedWords", "has_ordered_stores", "share_words"]

_PROGRESS, _STOP = 0, 8
"""Each of the words has a cache line of its own."""

_SIZE_BYTES: Final = 4096
_STEPS: Final = 1 << 12
"""More safepoints than any model has, the end of the pass included."""

_SPINS: Final = 200
_FIRST_SLEEP_S: Final = 20e-6


def has_ordered_stores() -> bool:
    """Return whether this processor makes stores visible in the order of the program."""
    return platform.machine().lower() in ("x86_64", "amd64")


class SharedWords:
    """64-bit words in memory that the ranks of a machine share."""

    def __init__(self, file: int) -> None:
        """Map the open file; it may be closed and unlinked then."""
        self._map = mmap.mmap(file, _SIZE_BYTES)
        self.words = memoryview(self._map).cast("q")


def share_words(group: Any, rank: int) -> SharedWords:
    """Return the same words on every rank of the CPU group ``group``; all of them must call it.

    The file is gone as soon as all have it open: nothing is left behind by a crash.
    """
    distributed = torch.distributed
    leader = distributed.get_global_rank(group, 0)
    path: list[str | None] = [None]
    if rank == 0:
        directory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        file, path[0] = tempfile.mkstemp(prefix="coserve-safepoints-", dir=directory)
        os.ftruncate(file, _SIZE_BYTES)
    distributed.broadcast_object_list(path, src=leader, group=group)
    assert path[0] is not None
    if rank != 0:
        file = os.open(path[0], os.O_RDWR)
    try:
        words = SharedWords(file)
        distributed.barrier(group=group)
    finally:
        os.close(file)
        if rank == 0:
            Path(path[0]).unlink()
    return words


class _SharedGate:
    """What both gates have in common: in an armed batch every safepoint asks."""

    def __init__(self, shared: SharedWords) -> None:
        # A numpy array has the item type that memoryview reads fastest.
        self.attention = memoryview(torch.zeros(1, dtype=torch.int32).numpy())
        self._words = shared.words
        self._step = 0

    def arm(self, batch: int) -> None:
        """See ``Gate.arm``; all ranks arm the same batches."""
        self._step = batch * _STEPS
        self.attention[0] = batch

    def disarm(self) -> None:
        """See ``Gate.disarm``."""
        self.attention[0] = 0


class LeaderGate(_SharedGate):
    """Rank 0's gate: decides by the flag, and tells."""

    def __init__(self, shared: SharedWords, flag: PreemptionFlag) -> None:
        super().__init__(shared)
        self._flag = flag.words

    def reached(self, layer: int) -> None:
        """See ``Gate.reached``."""
        words = self._words
        step = self._step + layer
        if self._flag[0] != self.attention[0]:
            words[_PROGRESS] = step
            return
        words[_STOP] = step
        words[_PROGRESS] = step
        raise ForwardPreempted(layer)


class FollowerGate(_SharedGate):
    """The gate of the other ranks: waits for rank 0 to have come as far, and does as it did."""

    def __init__(
        self, shared: SharedWords, *, timeout_s: float = 120.0, longest_sleep_s: float = 1e-3
    ) -> None:
        """``timeout_s`` is the longest to wait for rank 0: a rank that hangs ends the server;
        ``longest_sleep_s`` is the longest between two looks at where it is."""
        super().__init__(shared)
        self._timeout_s = timeout_s
        self._longest_sleep_s = longest_sleep_s

    def reached(self, layer: int) -> None:
        """See ``Gate.reached``.

        Raises:
            RuntimeError: rank 0 does not come.
        """
        step = self._step + layer
        if not self._has_come(step):
            self._wait_for(step)
        if self._words[_STOP] == step:
            raise ForwardPreempted(layer)

    def _wait_for(self, step: int) -> None:
        """Spin for a moment, since ranks are rarely apart; then sleep, ever longer."""
        for _ in range(_SPINS):
            if self._has_come(step):
                return
        deadline_s = time.perf_counter() + self._timeout_s
        sleep_s = _FIRST_SLEEP_S
        while not self._has_come(step):
            if time.perf_counter() > deadline_s:
                raise RuntimeError(
                    f"rank 0 did not reach layer {step % _STEPS} of batch {step // _STEPS} within "
                    f"{self._timeout_s:.0f} s: it hangs or has died"
                )
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, self._longest_sleep_s)

    def _has_come(self, step: int) -> bool:
        """Return whether rank 0 is at this step or beyond, in the same batch."""
        return 0 <= self._words[_PROGRESS] - step < _STEPS
