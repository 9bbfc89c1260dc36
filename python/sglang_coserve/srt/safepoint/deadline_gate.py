"""A gate that also stops the armed batch at a deadline."""

from __future__ import annotations

import math
import time

import torch

from sglang_coserve.srt.safepoint.flag import PreemptionFlag
from sglang_coserve.srt.safepoint.instrument import Gate

__all__ = ["DeadlineGate"]


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
