"""What was seen of one request, when, and why a run ends early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sglang_coserve.errors import CoserveError

__all__ = ["READY_TIMEOUT_S", "ChaosError", "Interval", "Observation"]

READY_TIMEOUT_S: Final = 300.0
"""For a server that starts, on a machine with other work."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One answer, one gap between two tokens of a stream, or one failure."""

    kind: str
    """``ping`` (a route without any work), ``health`` (one token), ``gap``, ``stream``, ``batch``
    (a call of the Batch API), or the name of what a storm sent."""

    start_s: float
    """On the monotonic clock, which all processes of the machine share; so is ``end_s``."""

    end_s: float
    status: int
    """Of HTTP; 0 for a connection that failed or broke."""

    is_different: bool = False
    """A stream ended well, but with another text than the undisturbed one."""

    detail: str = ""
    """Of a failure: what was answered."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A time on the monotonic clock, which all processes of the machine share."""

    start_s: float
    end_s: float

    def overlaps(self, start_s: float, end_s: float) -> bool:
        """Tell whether anything of [``start_s``, ``end_s``] is within it."""
        return start_s <= self.end_s and end_s >= self.start_s


class ChaosError(CoserveError):
    """The server did not end, start or finish in time; what was seen so far is in the message."""
