"""Offline requests that wait: SGLang's objects, in the order of admission without a plan.

A plan picks them by rid, in the order of the core's queue.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.srt.marks.offline_marks import deadline_of, expected_tokens_of

__all__ = ["OfflineWaiting", "queued_request"]

Req = Any


class OfflineWaiting:
    """First come, first served, but those that ran and were released come first.

    They cool down before: with overlap scheduling the result of a request's last forward pass is
    still queued when the request is released; admitted again in the same pass, it would take that
    stale result for its own. In a pipeline results are under way for longer.
    """

    def __init__(self, passes_to_settle: int = 1) -> None:
        """``passes_to_settle`` are those until a result that is under way has come."""
        self.reqs = OrderedDict[str, Req]()
        """Those that may be admitted, by rid."""

        self._cooling: deque[list[Req]] = deque([] for _ in range(passes_to_settle))
        """Those put back in each of the last passes, the oldest first."""

    def __len__(self) -> int:
        """Count all waiting requests, cooling ones included."""
        return len(self.reqs) + sum(map(len, self._cooling))

    def __iter__(self) -> Iterator[Req]:
        """Iterate over all of them, in the order of admission."""
        for reqs in reversed(self._cooling):
            yield from reversed(reqs)
        yield from self.reqs.values()

    def put_back(self, req: Req) -> None:
        """Put a request back that ran before: first in line, after the cool-down."""
        self._cooling[-1].append(req)

    def start_pass(self) -> list[Req]:
        """Count a pass of the cool-downs; return those that may be admitted from now on."""
        ready = self._cooling.popleft()
        self._cooling.append([])
        self._put_first(ready)
        return ready

    def take(self, count: int) -> list[Req]:
        """Remove and return the first ``count`` that may be admitted, or all of them. O(count)."""
        return [self.reqs.popitem(last=False)[1] for _ in range(min(count, len(self.reqs)))]

    def put_back_taken(self, reqs: Iterable[Req]) -> None:
        """Return requests, in their order, that were taken in this pass but not admitted."""
        self._put_first(reversed(list(reqs)))

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Take out and return all requests that match. O(waiting)."""
        gone = [req for req in self if matches(req)]
        if gone:
            ids = set(map(id, gone))
            for reqs in self._cooling:
                reqs[:] = [req for req in reqs if id(req) not in ids]
            for req in gone:
                self.reqs.pop(req.rid, None)
        return gone

    def _put_first(self, reqs: Iterable[Req]) -> None:
        """Put each of them in front of the one before it."""
        for req in reqs:
            self.reqs[req.rid] = req
            self.reqs.move_to_end(req.rid, last=False)


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
