"""Decides, when an online request arrives, whether the batch that runs is to be aborted."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.preemption import decide
from sglang_coserve.srt.safepoint.flag import PreemptionFlag
from sglang_coserve.srt.safepoint.in_flight import InFlight
from sglang_coserve.srt.safepoint.inbox import Arrival, Inbox

__all__ = ["AbortRequest", "ArrivalWatch"]

_ROLLBACK_S: Final = 1e-3
"""What it takes to give back what an aborted batch holds; 0.1 to 0.7 ms were measured."""


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Why the flag was raised."""

    batch: int
    arrivals: tuple[Arrival, ...]
    raised_s: float


class ArrivalWatch:
    """ConServe's Algorithm 2, run by whichever thread sees an arrival and a batch together.

    The event loop opens a batch and then looks for arrivals; the monitor thread puts
    an arrival into the inbox and then looks for an open batch. So one of the two
    finds both, whatever the order.
    """

    def __init__(self, inbox: Inbox, flag: PreemptionFlag, ttft_target_s: float | None) -> None:
        """``ttft_target_s`` is the target of requests that bring none of their own."""
        self._inbox = inbox
        self._flag = flag
        self._ttft_target_s = ttft_target_s
        # A decision is made and published as one: made for a batch that has ended meanwhile, it
        # could overwrite the next one's.
        self._lock = threading.Lock()
        self._in_flight: InFlight | None = None
        self._stoppable = 0
        self._request: AbortRequest | None = None

    def open(self, in_flight: InFlight) -> None:
        """Let this batch be aborted from now on, also for what has arrived already."""
        with self._lock:
            self._flag.lower()
            self._request = None
            self._in_flight = in_flight
        self.consider()

    def open_stoppable(self, batch: int) -> None:
        """Let this batch stop for any arrival from now on, since it will go on."""
        with self._lock:
            self._flag.lower()
            self._request = None
            self._stoppable = batch
        self.consider()

    def close(self) -> AbortRequest | None:
        """Note that the batch has ended; return the request to abort it, if there was one."""
        with self._lock:
            self._in_flight = None
            self._stoppable = 0
            self._flag.lower()
            return self._request

    def consider(self) -> None:
        """Raise the flag if an arrival that waits for the open batch would be late."""
        with self._lock:
            in_flight = self._in_flight
            if self._request is not None or (in_flight is None and not self._stoppable):
                return
            arrivals = self._inbox.arrivals()
            now_s = time.perf_counter()
            if in_flight is None:
                if arrivals:
                    self._request = AbortRequest(self._stoppable, tuple(arrivals), now_s)
                    self._flag.raise_for(self._stoppable)
                return
            if arrivals and self._is_worth_an_abort(in_flight, arrivals, now_s):
                self._request = AbortRequest(in_flight.batch, tuple(arrivals), now_s)
                self._flag.raise_for(in_flight.batch)

    def _is_worth_an_abort(
        self, in_flight: InFlight, arrivals: list[Arrival], now_s: float
    ) -> bool:
        # What of a prompt is cached is not known here: the event loop owns the cache.
        prefills = [(arrival.prompt_tokens, 0) for arrival in arrivals if arrival.prompt_tokens]
        # Online decodes go on beside them.
        next_batch = BatchStats.of(prefills)._replace(
            decode_requests=in_flight.online.decode_requests,
            decode_context_tokens=in_flight.online.decode_context_tokens,
        )
        decision = decide(
            in_flight.model,
            in_flight.whole,
            in_flight.online,
            now_s - in_flight.started_s,
            next_batch,
            self._ttft_left_s(arrivals, now_s),
            arrival_wait_s=in_flight.arrival_wait_s,
            safepoint_s=(
                in_flight.model.predict(in_flight.whole) * in_flight.abort_share + _ROLLBACK_S
            ),
            restarts_online=in_flight.restarts_online,
        )
        return decision.abort

    def _ttft_left_s(self, arrivals: list[Arrival], now_s: float) -> float | None:
        """Return the time until the first of the arrivals misses its target."""
        deadlines = [
            arrival.arrival_s + target_s
            for arrival in arrivals
            if (target_s := arrival.ttft_target_s or self._ttft_target_s) is not None
        ]
        return min(deadlines) - now_s if deadlines else None
