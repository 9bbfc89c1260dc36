"""Stores by how much each batch delayed online requests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from sglang_coserve.batch.store import Store, batch_rows
from sglang_coserve.lines.backend import Backend

__all__ = ["COUNT_INTERVAL_S", "OnlineDelays"]

COUNT_INTERVAL_S: Final = 5.0
"""What a crash costs of the sums. Each time is a message to every scheduler and back."""


class OnlineDelays:
    """Adds what the engine bills to the rows of batches, also of those that have ended: an online
    request is billed when it has ended itself."""

    def __init__(self, backend: Backend, store: Store) -> None:
        self._backend = backend
        self._store = store
        self._counted_s: dict[str, float] = {}

    async def count(self, unfinished: Collection[str]) -> None:
        """Add what was billed since the last time. ``unfinished`` batches that were not are known
        to have delayed nobody.

        Raises:
            StorageError: the database cannot be written; what was billed is added next time.
        """
        billed_s = await self._backend.online_delays_s()
        if billed_s is None:
            return
        counted_s = self._counted_s
        added_s = {batch_id: 0.0 for batch_id in unfinished if batch_id not in counted_s}
        for batch_id, seconds in billed_s.items():
            if seconds != counted_s.get(batch_id):
                added_s[batch_id] = seconds - counted_s.get(batch_id, 0.0)
        if added_s:
            await self._store.run(batch_rows.add_online_delays, added_s)
        # The engine forgets what was billed long ago, and would begin again at 0.
        self._counted_s = dict.fromkeys(unfinished, 0.0) | dict(billed_s)
