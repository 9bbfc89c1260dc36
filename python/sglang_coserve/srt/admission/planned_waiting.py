"""Offline requests that wait for a plan to pick them: SGLang's objects, in the core's order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.srt.marks.offline_marks import deadline_of, expected_tokens_of

__all__ = ["PlannedWaiting", "queued_request"]

Req = Any


class PlannedWaiting:
    """The core's queue knows them by name."""

    def __init__(self, passes_to_settle: int = 1) -> None:
        """``passes_to_settle`` are those until a result that is under way has come."""
        self.reqs: dict[str, Req] = {}
        """Those that may be picked, by rid."""

        self._cooling: deque[list[Req]] = deque([] for _ in range(passes_to_settle))
        """Retracted in each of the last passes, the oldest first."""

    def __len__(self) -> int:
        return len(self.reqs) + sum(map(len, self._cooling))

    def put_back(self, req: Req) -> None:
        """Put a request back that ran before; it waits until no result of it can be under way."""
        self._cooling[-1].append(req)

    def start_pass(self) -> list[Req]:
        """Return those that were put back and may be picked from now on."""
        ready = self._cooling.popleft()
        self._cooling.append([])
        self.reqs |= {req.rid: req for req in ready}
        return ready

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Take out and return the requests that match. O(waiting)."""
        cooling = [req for reqs in self._cooling for req in reqs]
        gone = [req for req in (*cooling, *self.reqs.values()) if matches(req)]
        for reqs in self._cooling:
            reqs[:] = [req for req in reqs if not matches(req)]
        for req in gone:
            self.reqs.pop(req.rid, None)
        return gone


def queued_request(req: Req, arrival_s: float) -> QueuedRequest:
    """Return the core's description of a request that waits for the first time."""
    return QueuedRequest(
        rid=req.rid,
        token_ids=pack_tokens(req.origin_input_ids),
        arrival_s=arrival_s,
        max_new_tokens=req.sampling_params.max_new_tokens,
        num_generated_tokens=len(req.output_ids),
        deadline_s=deadline_of(req, arrival_s),
        expected_output_tokens=expected_tokens_of(req),
    )
