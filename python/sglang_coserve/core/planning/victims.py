"""The order in which offline requests are retracted."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_coserve.core.planning.step_requests import StepRequests
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import Request

__all__ = ["last_admitted_first", "yields_first"]

_RANK = {
    RequestState.PARKED: 0,
    RequestState.PAUSED: 1,
    RequestState.PREFILLING: 2,
    RequestState.DECODING: 2,
}


def yields_first(request: Request) -> int:
    """Return the retraction rank of a request: parked (0), then paused (1), then running (2)."""
    return _RANK[request.state]


def last_admitted_first(requests: StepRequests) -> Sequence[Request]:
    """Return the offline requests in the order of retraction: parked, paused, running.

    Within a rank, the last admitted comes first, since the oldest are closest to their end.
    O(requests log requests); called only when KV is short.
    """
    admitted = {request.info.rid: place for place, request in enumerate(requests.snapshot.admitted)}
    return sorted(
        requests.offline, key=lambda request: (yields_first(request), -admitted[request.info.rid])
    )
