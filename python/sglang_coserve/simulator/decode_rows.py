"""The decoding rows, with the sums that plans are checked against."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from sglang_coserve.core.request import RequestState
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.simulator.request import SimRequest

__all__ = ["DecodeRows"]


class DecodeRows:
    """The decoding rows among ``rows``, in their order, and sums over them.

    Each step adds a token to all of them, so the sums are updated in O(1), and in O(rows added or
    removed) when rows change.
    """

    def __init__(
        self,
        rows: Iterable[SimRequest],
        page_tokens: int,
        state: RequestState = RequestState.DECODING,
    ) -> None:
        """``state`` is the state of decoding rows, which depends on the lane."""
        self.rows = [row for row in rows if row.state is state]
        """A new list after each change, so that a step keeps the rows that it began with."""

        self.num_online = sum(row.info.is_online for row in self.rows)
        self._context_tokens = sum(row.computed_tokens for row in self.rows)
        self._page_tokens = page_tokens
        self._iterations = 0
        self._rows_by_fill = [0] * page_tokens
        """Number of rows by tokens in their last page (0: full), before the first ``advance``."""

        for row in self.rows:
            self._rows_by_fill[row.computed_tokens % page_tokens] += 1

    @property
    def opened_pages(self) -> int:
        """Pages to allocate for one more token of each row."""
        return self._rows_by_fill[-self._iterations % self._page_tokens]

    def add_to(self, prefills: StepStats) -> StepStats:
        """Return the sums over the prefills and one token of each row."""
        count = len(self.rows)
        return prefills._replace(
            decode_requests=count,
            decode_context_tokens=self._context_tokens + count,
        )

    def advance(self) -> None:
        """Record that each row has computed one more token. O(1)."""
        self._context_tokens += len(self.rows)
        self._iterations += 1

    def change(self, come: Sequence[SimRequest], go: Sequence[SimRequest]) -> None:
        """Add rows, and remove others, which need not be present."""
        rows = self.rows.copy()
        for row in come:
            rows.insert(bisect_left(rows, row.place, key=_place), row)
            self._count(row, 1)
        for row in go:
            index = bisect_left(rows, row.place, key=_place)
            if index < len(rows) and rows[index] is row:
                del rows[index]
                self._count(row, -1)
        self.rows = rows

    def _count(self, row: SimRequest, number: int) -> None:
        self.num_online += number * row.info.is_online
        self._context_tokens += number * row.computed_tokens
        fill = (row.computed_tokens - self._iterations) % self._page_tokens
        self._rows_by_fill[fill] += number

    def check_invariants(self, rows: Iterable[SimRequest]) -> None:
        """Assert that the sums equal those computed anew from ``rows``."""
        fresh = DecodeRows(rows, self._page_tokens)
        assert (self.rows, self.num_online) == (fresh.rows, fresh.num_online)
        assert self._context_tokens == fresh._context_tokens
        assert self.opened_pages == fresh.opened_pages


def _place(row: SimRequest) -> int:
    return row.place
