"""The gate of an engine with one rank, where the flag alone decides."""

from __future__ import annotations

from sglang_coserve.srt.safepoint.flag import PreemptionFlag
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted

__all__ = ["LocalGate"]


class LocalGate:
    """A gate that stops the armed batch when the flag holds its id."""

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
