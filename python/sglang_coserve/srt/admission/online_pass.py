"""SGLang's own pass, beside offline requests: online requests are served, and offline ones wait.

The pass stands in for a plan in three cases: the plan has failed; SGLang has a rule that plans do
not know; offline work has stopped. Offline requests that decode go on, as SGLang decodes every
request of its running batch. Paused, parked and suspended ones stay where they are, and give way
where an online request lacks their memory.
"""

from __future__ import annotations

from typing import Any

from sglang_coserve.srt.compat import prefix_tokens
from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.steps.engine_parts import EngineParts
from sglang_coserve.srt.steps.offline_retraction import Prefill

Req = Any
ScheduleBatch = Any


class OnlinePass:
    """See the module's docstring."""

    def __init__(self, parts: EngineParts) -> None:
        self._scheduler = parts.scheduler
        self._pools = parts.pools
        self._view = parts.view
        self._retraction = parts.retraction
        self._ledger = parts.ledger
        self._lane = parts.lane
        self._events = parts.events

    def admit(self, running_batch: ScheduleBatch, prefill: Prefill) -> Any:
        """Return SGLang's plan of the next batch; ``prefill`` is its admission."""
        self._park_offline()
        self._make_room_for_online_chunk(running_batch)
        return self._retraction.admit(running_batch, prefill)

    def recover(self, running_batch: ScheduleBatch) -> None:
        """Put every request back in its place after a plan that failed halfway. O(requests).

        A request that was on its way from one place to another waits again.
        """
        self._view.withdraw()
        self._lane.forget_launched()
        placed = {id(req) for req in self._view.requests_with_kv(running_batch)}
        placed |= {id(req) for req in self._view.elsewhere()}
        online, offline = self._ledger.with_kv()
        for req in (*online, *offline):
            if id(req) not in placed and not req.finished():
                self._retraction.release(req)

    def retract_offline(self, running_batch: ScheduleBatch) -> None:
        """Let all offline requests of this micro-batch wait, without KV. O(requests)."""
        if self._lane.suspended is not None:
            self._lane.drop()
        self._park_offline()
        reqs = (*running_batch.reqs, *self._view.paused_requests.reqs)
        self._retraction.retract({req.rid for req in reqs if is_offline(req)}, running_batch)

    def _park_offline(self) -> None:
        """Park the unfinished prefill if its request is offline: SGLang would go on with it before
        it looks at its queue."""
        if self._view.chunk is not None and is_offline(self._view.chunk):
            self._events["parked"] += self._view.park_chunk()

    def _make_room_for_online_chunk(self, running_batch: ScheduleBatch) -> None:
        """Free the memory of an online prompt's next chunk, for which SGLang does not wait."""
        req = self._view.chunk
        if req is None or is_offline(req):
            return
        remaining = len(req.origin_input_ids) + len(req.output_ids) - prefix_tokens(req)
        chunk = min(remaining, self._scheduler.chunked_prefill_size or remaining)
        while self._pools.headroom_tokens < chunk + self._scheduler.page_size:
            if not self._retraction.retract_one(running_batch):
                return
