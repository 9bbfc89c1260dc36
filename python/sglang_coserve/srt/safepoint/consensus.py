"""How tensor-parallel ranks stop before the same layer: rank 0 decides, the others follow.

If only some ranks stopped, the others would hang in a collective operation. ConServe
broadcasts at every safepoint. Here rank 0 writes its progress, and whether it stops,
to memory shared by all ranks of a machine, and the others wait at a safepoint until rank 0 has
reached it. No message to rank 0 is needed: up to that layer all ranks have run the same
collectives, so rank 0 is at most one safepoint ahead.

The words are written in one order and read in the opposite order, without barriers, which relies
on a processor that does not reorder stores (x86).
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

from sglang_coserve.srt.safepoint.instrument import ForwardPreempted, Gate

__all__ = ["FollowerGate", "SharedWords", "has_ordered_stores", "share_words"]

_PROGRESS, _STOP = 0, 8
"""Indices of the words, each on its own cache line."""

_SIZE_BYTES: Final = 4096
_STEPS: Final = 1 << 12
"""More than the number of layers of any model."""

_SPINS: Final = 200
_FIRST_SLEEP_S: Final = 20e-6


def has_ordered_stores() -> bool:
    """Return whether this processor makes stores visible in program order."""
    return platform.machine().lower() in ("x86_64", "amd64")


class SharedWords:
    """64-bit words in memory that the ranks of a machine share."""

    def __init__(self, file: int) -> None:
        """Map an open file, which may be closed and unlinked afterwards."""
        self._map = mmap.mmap(file, _SIZE_BYTES)
        self.words = memoryview(self._map).cast("q")

    def publish(self, batch: int, layer: int, stops: bool) -> None:
        """Tell the other ranks how far rank 0 is, and whether it stops there."""
        step = batch * _STEPS + layer
        if stops:
            self.words[_STOP] = step
        self.words[_PROGRESS] = step


def share_words(group: Any, rank: int) -> SharedWords:
    """Return the same words on every rank of the CPU group ``group``; all of them must call it.

    The file is unlinked as soon as all ranks have opened it, so a crash leaves nothing behind.
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


class FollowerGate(Gate):
    """The gate of the other ranks: waits until rank 0 is as far, and follows its decision."""

    def __init__(
        self, shared: SharedWords, *, timeout_s: float = 120.0, longest_sleep_s: float = 1e-3
    ) -> None:
        """Create a gate.

        Args:
            shared: The words shared with rank 0.
            timeout_s: Longest wait for rank 0; after that an error ends the server.
            longest_sleep_s: Longest sleep between two checks of rank 0's progress.
        """
        super().__init__()
        self._words = shared.words
        self._timeout_s = timeout_s
        self._longest_sleep_s = longest_sleep_s

    def reached(self, layer: int) -> None:
        """See ``Gate.reached``.

        Raises:
            RuntimeError: rank 0 does not get there in time.
        """
        step = self.attention[0] * _STEPS + layer
        if not self._has_come(step):
            self._wait_for(step)
        if self._words[_STOP] == step:
            raise ForwardPreempted(layer)

    def _wait_for(self, step: int) -> None:
        """Spin briefly, since ranks are rarely apart; then sleep with increasing intervals."""
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
        """Return whether rank 0 is at this safepoint or beyond it, in the same batch."""
        return 0 <= self._words[_PROGRESS] - step < _STEPS
