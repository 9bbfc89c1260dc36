"""Asks the running batch to stop when an online request arrives."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from sglang_coserve.srt.safepoint.flag import PreemptionFlag
from sglang_coserve.srt.safepoint.inbox import Arrival, Inbox

__all__ = ["ArrivalWatch", "StopRequest"]


@dataclass(frozen=True, slots=True)
class StopRequest:
    """The arrivals for which the flag was raised, and when."""

    arrivals: tuple[Arrival, ...]
    raised_s: float


class ArrivalWatch:
    """Raises the flag when there are both an open batch and an arrival.

    The event loop opens a batch and then checks for arrivals; the monitor thread puts
    an arrival into the inbox and then checks for an open batch. So at least one of the two
    threads sees both, whatever the order.
    """

    def __init__(self, inbox: Inbox, flag: PreemptionFlag) -> None:
        self._inbox = inbox
        self._flag = flag
        # Makes checking and raising atomic: a late raise for a batch that has ended could
        # overwrite the flag of the next one.
        self._lock = threading.Lock()
        self._batch = 0
        """Id of the open batch in the flag; 0 if none is open."""

        self._request: StopRequest | None = None

    def open(self, batch: int) -> None:
        """Let this batch be stopped by any arrival, including those already in the inbox."""
        with self._lock:
            self._flag.lower()
            self._request = None
            self._batch = batch
        self.consider()

    def close(self) -> StopRequest | None:
        """Close the batch, which has stopped or ended; return the request to stop it, if any."""
        with self._lock:
            self._batch = 0
            self._flag.lower()
            return self._request

    def consider(self) -> None:
        """Raise the flag if a batch is open and an online request has arrived."""
        with self._lock:
            if not self._batch or self._request is not None:
                return
            arrivals = self._inbox.arrivals()
            if arrivals:
                self._request = StopRequest(tuple(arrivals), time.perf_counter())
                self._flag.raise_for(self._batch)
