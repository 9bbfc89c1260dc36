"""The flag that asks a forward pass to stop at its next safepoint."""

from __future__ import annotations

import torch

__all__ = ["PreemptionFlag", "batch_id"]

_LARGEST_ID = 2**31 - 1
_CACHE_LINE_WORDS = 16


def batch_id(forward_count: int) -> int:
    """Return a batch's id in the flag: a positive int32, reused only after 2³¹ - 1 batches."""
    return 1 + forward_count % _LARGEST_ID


class PreemptionFlag:
    """Holds the id of the batch to stop; 0 for none.

    It is an id rather than a bit, so that a flag raised too late for its batch does not stop
    the next one. It is one int32 on its own cache line, optionally in pinned memory that the
    device can read as well.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._tensor = torch.zeros(_CACHE_LINE_WORDS, dtype=torch.int32, pin_memory=pinned)
        self.words = memoryview(self._tensor.numpy())
        """Memory whose first word is the flag; the fastest way to read it from Python (20 ns)."""

    def raise_for(self, batch: int) -> None:
        """Ask this batch to stop."""
        self.words[0] = batch

    def lower(self) -> None:
        """Ask no batch to stop."""
        self.words[0] = 0
