"""The decoding requests, with the sums that plans are checked against."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from sglang_coserve.core.request import RequestState
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.simulator.request import SimRequest

__all__ = ["DecodingRequests"]


class DecodingRequests:
    """The decoding requests among ``requests``, in their order, and sums over them.

    Each step adds a token to all of them, so the sums are updated in O(1), and in O(requests added
    or removed) when requests change.
    """

    def __init__(
        self,
        requests: Iterable[SimRequest],
        page_tokens: int,
        state: RequestState = RequestState.DECODING,
    ) -> None:
        """``state`` is the state of decoding requests, which depends on the lane."""
        self.requests = [request for request in requests if request.state is state]
        """A new list after each change, so that a step keeps the requests that it began with."""

        self.num_online = sum(request.info.is_online for request in self.requests)
        self._context_tokens = sum(request.computed_tokens for request in self.requests)
        self._page_tokens = page_tokens
        self._iterations = 0
        self._requests_by_fill = [0] * page_tokens
        """Number of requests by tokens in their last page (0: full), before ``advance``."""

        for request in self.requests:
            self._requests_by_fill[request.computed_tokens % page_tokens] += 1

    @property
    def opened_pages(self) -> int:
        """Pages to allocate for one more token of each request."""
        return self._requests_by_fill[-self._iterations % self._page_tokens]

    def add_to(self, prefills: StepStats) -> StepStats:
        """Return the sums over the prefills and one token of each request."""
        count = len(self.requests)
        return prefills._replace(
            decode_requests=count,
            decode_context_tokens=self._context_tokens + count,
        )

    def advance(self) -> None:
        """Record that each request has computed one more token. O(1)."""
        self._context_tokens += len(self.requests)
        self._iterations += 1

    def change(self, come: Sequence[SimRequest], go: Sequence[SimRequest]) -> None:
        """Add requests, and remove others, which need not be present."""
        requests = self.requests.copy()
        for request in come:
            requests.insert(bisect_left(requests, request.place, key=_place), request)
            self._count(request, 1)
        for request in go:
            index = bisect_left(requests, request.place, key=_place)
            if index < len(requests) and requests[index] is request:
                del requests[index]
                self._count(request, -1)
        self.requests = requests

    def _count(self, request: SimRequest, number: int) -> None:
        self.num_online += number * request.info.is_online
        self._context_tokens += number * request.computed_tokens
        fill = (request.computed_tokens - self._iterations) % self._page_tokens
        self._requests_by_fill[fill] += number

    def check_invariants(self, requests: Iterable[SimRequest]) -> None:
        """Assert that the sums equal those computed anew from ``requests``."""
        fresh = DecodingRequests(requests, self._page_tokens)
        assert (self.requests, self.num_online) == (fresh.requests, fresh.num_online)
        assert self._context_tokens == fresh._context_tokens
        assert self.opened_pages == fresh.opened_pages


def _place(request: SimRequest) -> int:
    return request.place
