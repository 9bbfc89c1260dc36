"""Offline requests that wait for a plan to pick them: SGLang's objects, in the core's order.

One that was put back waits until no result of it can be under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.srt.marks.offline_marks import deadline_of, expected_tokens_of

__all__ = ["CoolDown", "PlannedWaiting", "queued_request"]

Req = Any


class CoolDown:
    """Keeps SGLang ``Req`` objects that ran and were released out of the next passes.

    With overlap scheduling the result of a request's last forward pass is still
    queued when the request is released; admitted again in the same pass, it
    would take that stale result for its own. In a pipeline results are under way for longer.
    """

    def __init__(self, passes: int) -> None:
        """``passes`` are those until a result that is under way has come."""
        self._passes: deque[list[Req]] = deque([] for _ in range(passes))
        """Those put back in each of the last passes, the oldest first."""

    def __len__(self) -> int:
        return sum(map(len, self._passes))

    def __iter__(self) -> Iterator[Req]:
        """Iterate over the requests, the last one first."""
        for reqs in reversed(self._passes):
            yield from reversed(reqs)

    def put_back(self, req: Req) -> None:
        """Add a request."""
        self._passes[-1].append(req)

    def start_pass(self) -> list[Req]:
        """Count a pass; remove and return those that may be admitted in it, in order."""
        ready = self._passes.popleft()
        self._passes.append([])
        return ready

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Remove and return all requests that match. O(n)."""
        removed = []
        for reqs in self._passes:
            removed += [req for req in reqs if matches(req)]
            reqs[:] = [req for req in reqs if not matches(req)]
        return removed


class PlannedWaiting:
    """The core's queue knows them by name."""

    def __init__(self, passes_to_settle: int = 1) -> None:
        """``passes_to_settle``: see ``CoolDown``."""
        self.reqs: dict[str, Req] = {}
        """Those that may be picked, by rid."""

        self._cooling = CoolDown(passes_to_settle)

    def __len__(self) -> int:
        return len(self.reqs) + len(self._cooling)

    def __iter__(self) -> Iterator[Req]:
        """Iterate over all of them, in no order."""
        yield from self.reqs.values()
        yield from self._cooling

    @property
    def has_ready(self) -> bool:
        """See ``fifo_pass.Waiting``."""
        return bool(self.reqs)

    def take(self, count: int) -> list[Req]:
        """See ``fifo_pass.Waiting``."""
        return [self.reqs.pop(rid) for rid in list(islice(self.reqs, count))]

    def put_back_taken(self, reqs: Iterable[Req]) -> None:
        """See ``fifo_pass.Waiting``. O(waiting)."""
        waiting = {**{req.rid: req for req in reqs}, **self.reqs}
        self.reqs.clear()
        self.reqs.update(waiting)

    def put_back(self, req: Req) -> None:
        """Put a request back that ran before; it waits until no result of it can be under way."""
        self._cooling.put_back(req)

    def start_pass(self) -> list[Req]:
        """Return those that were put back and may be picked from now on."""
        ready = self._cooling.start_pass()
        self.reqs |= {req.rid: req for req in ready}
        return ready

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Take out and return the requests that match. O(waiting)."""
        gone = [req for req in self.reqs.values() if matches(req)]
        for req in gone:
            del self.reqs[req.rid]
        return self._cooling.remove(matches) + gone


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
