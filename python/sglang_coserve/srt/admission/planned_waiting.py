"""Offline requests that wait for a plan to pick them: SGLang's objects, in the core's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.srt.offline_marks import deadline_of, expected_tokens_of

__all__ = ["PlannedWaiting", "queued_request"]

Req = Any


class PlannedWaiting:
    """The core's queue knows them by name."""

    def __init__(self) -> None:
        self.reqs: dict[str, Req] = {}
        """Those that may be picked, by rid."""

        self._cooling: list[Req] = []
        """Evicted since the last pass began; they wait again from the next one on."""

    def __len__(self) -> int:
        return len(self.reqs) + len(self._cooling)

    def put_back(self, req: Req) -> None:
        """Let a request wait that ran before, from the next pass on."""
        self._cooling.append(req)

    def start_pass(self) -> list[Req]:
        """Return those that were put back, which may be picked from now on."""
        ready, self._cooling = self._cooling, []
        self.reqs |= {req.rid: req for req in ready}
        return ready

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Take out and return the requests that match. O(waiting)."""
        gone = [req for req in (*self._cooling, *self.reqs.values()) if matches(req)]
        self._cooling = [req for req in self._cooling if not matches(req)]
        for req in gone:
            self.reqs.pop(req.rid, None)
        return gone


def queued_request(req: Req, arrival_s: float) -> QueuedRequest:
    """Return what the core's queue is told of a request that waits for the first time."""
    return QueuedRequest(
        rid=req.rid,
        token_ids=pack_tokens(req.origin_input_ids),
        arrival_s=arrival_s,
        max_new_tokens=req.sampling_params.max_new_tokens,
        num_generated_tokens=len(req.output_ids),
        deadline_s=deadline_of(req, arrival_s),
        expected_output_tokens=expected_tokens_of(req),
    )
