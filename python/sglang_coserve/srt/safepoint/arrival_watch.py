"""Asks the batch that runs to stop when an online request arrives."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from sglang_coserve.srt.safepoint.flag import PreemptionFlag
from sglang_coserve.srt.safepoint.inbox import Arrival, Inbox

__all__ = ["ArrivalWatch", "StopRequest"]


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Why the flag was raised."""

    arrivals: tuple[Arrival, ...]
    raised_s: float


class ArrivalWatch:
    """Raises the flag, in whichever thread sees an arrival and a batch together.

    The event loop opens a batch and then looks for arrivals; the monitor thread puts
    an arrival into the inbox and then looks for an open batch. So one of the two
    finds both, whatever the order.
    """

    def __init__(self, inbox: Inbox, flag: PreemptionFlag) -> None:
        self._inbox = inbox
        self._flag = flag
        # To look and to raise are one: the flag of a batch that has ended meanwhile could
        # overwrite the next one's.
        self._lock = threading.Lock()
        self._batch = 0
        """Its name in the flag; 0: none is open."""

        self._request: StopRequest | None = None

    def open(self, batch: int) -> None:
        """Let this batch stop for any arrival from now on, also for what has arrived already."""
        with self._lock:
            self._flag.lower()
            self._request = None
            self._batch = batch
        self.consider()

    def close(self) -> StopRequest | None:
        """Note that the batch has stopped or ended; return the request to stop it, if any."""
        with self._lock:
            self._batch = 0
            self._flag.lower()
            return self._request

    def consider(self) -> None:
        """Raise the flag if an online request has arrived, and a batch is open."""
        with self._lock:
            if not self._batch or self._request is not None:
                return
            arrivals = self._inbox.arrivals()
            if arrivals:
                self._request = StopRequest(tuple(arrivals), time.perf_counter())
                self._flag.raise_for(self._batch)
