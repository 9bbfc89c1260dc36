"""The rows that decode in every iteration, with what a plan is checked against."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.request import RequestState
from sglang_coserve.simulator.request import SimRequest

__all__ = ["DecodeRows"]


class DecodeRows:
    """The decoding rows among ``rows``, in their order, and sums over them.

    Each iteration adds a token to all of them, so that sums follow in O(1); in O(rows moved)
    where some come or go.
    """

    def __init__(
        self,
        rows: Iterable[SimRequest],
        page_tokens: int,
        state: RequestState = RequestState.DECODING,
    ) -> None:
        """``state`` is that of the rows that decode: it says in which lane."""
        self.rows = [row for row in rows if row.state is state]
        """Another list after each change: a step keeps the rows that it began with."""

        self.num_online = sum(row.info.is_online for row in self.rows)
        self._context_tokens = sum(row.computed_tokens for row in self.rows)
        self._page_tokens = page_tokens
        self._iterations = 0
        self._rows_by_fill = [0] * page_tokens
        """How many rows had so many tokens in their last page, 0 for a full one."""

        for row in self.rows:
            self._rows_by_fill[row.computed_tokens % page_tokens] += 1

    @property
    def opened_pages(self) -> int:
        """Pages that one more token for each row begins."""
        return self._rows_by_fill[-self._iterations % self._page_tokens]

    def add_to(self, prefills: BatchStats) -> BatchStats:
        """Return the sums over these prefills and one token of each row."""
        count = len(self.rows)
        return prefills._replace(
            decode_requests=count,
            decode_context_tokens=self._context_tokens + count,
        )

    def advance(self) -> None:
        """Take into account that each row has computed one token more."""
        self._context_tokens += len(self.rows)
        self._iterations += 1

    def change(self, come: Sequence[SimRequest], go: Sequence[SimRequest]) -> None:
        """Let rows come, and others go; some of those that go may never have come."""
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
        """Assert that it equals what would be made of ``rows`` now."""
        fresh = DecodeRows(rows, self._page_tokens)
        assert (self.rows, self.num_online) == (fresh.rows, fresh.num_online)
        assert self._context_tokens == fresh._context_tokens
        assert self.opened_pages == fresh.opened_pages


def _place(row: SimRequest) -> int:
    return row.place
