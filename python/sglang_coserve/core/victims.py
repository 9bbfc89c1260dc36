"""The order in which offline rows are retracted."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import Row
from sglang_coserve.core.step_builder import StepBuilder

__all__ = ["last_admitted_first", "yields_first"]

_RANK = {
    RequestState.PARKED: 0,
    RequestState.PAUSED: 1,
    RequestState.PREFILLING: 2,
    RequestState.DECODING: 2,
}


def yields_first(row: Row) -> int:
    """Return the retraction rank of a row: parked (0), then paused (1), then running (2)."""
    return _RANK[row.state]


def last_admitted_first(batch: StepBuilder) -> Sequence[Row]:
    """Return the offline rows in the order of retraction: parked, paused, running.

    Within a rank, the last admitted comes first, since the oldest are closest to their end.
    O(rows log rows); called only when KV is short.
    """
    rows = batch.offline_rows
    admitted = {row.info.rid: place for place, row in enumerate(batch.snapshot.rows)}
    return sorted(rows, key=lambda row: (yields_first(row), -admitted[row.info.rid]))
