"""The gates of a rank that decides alone: by the flag that asks to stop, and by a deadline."""

from __future__ import annotations

import math
import time

import torch

from sglang_coserve.srt.safepoint.instrument import ForwardPreempted, Gate

__all__ = ["DeadlineGate", "LocalGate", "PreemptionFlag", "batch_id"]

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


class LocalGate:
    """Stops the armed batch when the flag holds its id: the gate of an engine with one rank."""

    def __init__(self, flag: PreemptionFlag) -> None:
        self.attention = flag.words
        self._armed = 0

    def arm(self, batch: int) -> None:
        """See ``Gate.arm``."""
        self._armed = batch

    def disarm(self) -> None:
        """See ``Gate.disarm``."""
        self._armed = 0

    def reached(self, layer: int) -> None:
        """See ``Gate.reached``. A flag left over from another batch has no effect."""
        if self._armed and self.attention[0] == self._armed:
            raise ForwardPreempted(layer)


class DeadlineGate:
    """A gate that raises the flag when the deadline is near, then asks another gate.

    For the rank that decides. A group of layers is not begun if it would end after the deadline,
    assuming that it takes as long as the group before it.
    """

    def __init__(self, gate: Gate, flag: PreemptionFlag, outstanding_groups: int) -> None:
        """Create a gate.

        Args:
            gate: The gate that decides.
            flag: The flag by which it decides.
            outstanding_groups: Groups of layers still to be computed once one is begun,
                including that one.
        """
        # Makes every safepoint of an armed batch call ``reached``.
        self.attention = memoryview(torch.zeros(1, dtype=torch.int32).numpy())
        self.until_s = math.inf
        """Time (``time.perf_counter``) by which the next armed batch must have stopped."""

        self._gate = gate
        self._outstanding_groups = outstanding_groups
        self._flag = flag
        self._batch = 0
        self._last_s: float | None = None

    def arm(self, batch: int) -> None:
        """See ``Gate.arm``."""
        self._gate.arm(batch)
        self._batch, self._last_s = batch, None
        self.attention[0] = batch

    def disarm(self) -> None:
        """See ``Gate.disarm``."""
        self.attention[0] = 0
        self._gate.disarm()

    def reached(self, layer: int) -> None:
        """See ``Gate.reached``. The first group of a pass always runs."""
        now_s = time.perf_counter()
        if self._last_s is not None:
            group_s = now_s - self._last_s
            if now_s + self._outstanding_groups * group_s > self.until_s:
                self._flag.raise_for(self._batch)
        self._last_s = now_s
        self._gate.reached(layer)
