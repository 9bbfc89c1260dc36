"""Serves the passes without a plan: SGLang decides, with offline requests behind online ones.

The policy fifo has no plans at all. A pass offers some offline requests to SGLang only when no
online request is waiting or being prefilled, behind everything else, and takes back what was not
admitted. Without offline requests a pass is SGLang's after a constant-time test. Decisions depend
on neither clock nor chance, so tensor-parallel ranks stay in step.

With any other policy a plan advises SGLang, and must not end it. When one raises, the places of all
requests are put in order, and a pass without a plan is run instead. Waiting and paused offline
requests stay as they are for that pass. Where plans fail again and again, or fail when SGLang has
prepared a batch already, so that the core does not know what runs, there are no more plans until
the next start: offline requests are then served as the policy fifo serves them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from sglang.srt.managers.scheduler import NextBatchPlan

from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.srt.compat import drop_ended, prefix_tokens
from sglang_coserve.srt.marks.offline_marks import deadline_of, expected_tokens_of
from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.steps.engine_parts import EngineParts
from sglang_coserve.srt.steps.offline_retraction import Prefill


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
        for req in ready:  # Each in front of the one before it.
            self.reqs[req.rid] = req
            self.reqs.move_to_end(req.rid, last=False)
        return ready

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


Req = Any
ScheduleBatch = Any

_MAX_OFFERED: Final = 128
"""Offline requests offered to SGLang in one pass: its admission loop is linear in them."""

_MOST_IN_A_ROW: Final = 8
"""Failures without a plan in between. An accident does not come back as often in a row."""

_PART: Final = "planning"
"""Its name in ``Advisory``."""

logger = logging.getLogger(__name__)


class NotedPass:
    """SGLang's pass, with a note of how far it has come."""

    def __init__(self, prefill: Prefill) -> None:
        self._prefill = prefill
        self.is_inside = False
        """Whether SGLang's own code is running, or has raised."""

        self.result: Any = None
        """What it returned last; None before it did."""

    def __call__(self, running_batch: ScheduleBatch) -> Any:
        """Run it."""
        self.is_inside = True
        self.result = self._prefill(running_batch)
        self.is_inside = False
        return self.result


class UnplannedPasses:
    """See the module's docstring."""

    def __init__(
        self,
        parts: EngineParts,
        waiting: OfflineWaiting,
        *,
        has_plans: bool,
    ) -> None:
        """``has_plans`` is whether other passes have plans."""
        self._scheduler = parts.scheduler
        self._waiting = waiting
        self._most_running = parts.config.offline_max_running
        self._has_plans = has_plans
        self._pools = parts.pools
        self._view = parts.view
        self._retraction = parts.retraction
        self._ledger = parts.ledger
        self._lane = parts.lane
        self._events = parts.events
        self._advisory = parts.advisory
        self._in_a_row = 0
        self.num_failed = 0
        """Plans that failed since the start."""

    @property
    def are_all(self) -> bool:
        """Whether there are no plans, or no more."""
        return not self._has_plans or _PART in self._advisory.off

    def planned(self) -> None:
        """Note a plan that was carried out."""
        self._in_a_row = 0

    def failed(self, error: Exception, tried: NotedPass) -> None:
        """Note a plan that failed while, or before, it had SGLang's pass ``tried``.

        Raises:
            Exception: ``error``, if it is SGLang's own: another pass would not mend that.
        """
        if tried.is_inside:
            raise error
        self.num_failed += 1
        self._in_a_row += 1
        logger.error("no plan for this pass: SGLang's own serves it", exc_info=error)
        has_batch = tried.result is not None and tried.result.batch_to_run is not None
        if has_batch or self._in_a_row >= _MOST_IN_A_ROW:
            self.end_planning(error)

    def end_planning(self, error: Exception) -> None:
        """Make no more plans, as the core no longer knows what the engine does."""
        self._advisory.switch_off(_PART, error)

    def recover(self, running_batch: ScheduleBatch, tried: NotedPass, *, is_alone: bool) -> Any:
        """Put requests in their places, and run SGLang's pass if it has not prepared a batch.

        ``is_alone`` says of a prepared batch that it is one of the offline lane, beside which
        ``running_batch`` waits. O(requests).
        """
        self._view.withdraw()
        prepared = None if tried.result is None else tried.result.batch_to_run
        if prepared is None:
            self._lane.forget_launched()
            self._requeue_lost(running_batch, ())
            return self.admit(running_batch, tried)
        kept = running_batch if is_alone else tried.result.running_batch
        self._requeue_lost(kept, prepared.reqs)
        return NextBatchPlan(batch_to_run=prepared, running_batch=kept)

    def admit(self, running_batch: ScheduleBatch, prefill: Prefill) -> Any:
        """Run a pass without a plan.

        It admits online requests as SGLang does; offline ones only when none of them waits, and if
        no plan of a later pass will.
        """
        if self.are_all:
            self._end_pauses(running_batch)
        is_offered = False
        if self._online_waits():
            self._release_offline_chunk()
            self._make_room_for_online_chunk(running_batch)
            if in_the_way := self._retraction.rids_blocking_adapters(running_batch.reqs):
                drop_ended(running_batch)  # A finished request has nothing left to release.
                self._retraction.retract(in_the_way, running_batch)
        elif self.are_all and self._waiting.reqs:
            is_offered = self._offer(running_batch)
        plan = self._retraction.admit(running_batch, prefill)
        if is_offered:
            admitted = self._view.withdraw()
            for req in admitted:
                self._waiting.reqs.pop(req.rid, None)
            self._events["admitted"] += len(admitted)
            # A batch that is full for an offline request may have room for an online one, which
            # may be smaller and can displace offline requests.
            plan.running_batch.batch_is_full = False
        return plan

    def _online_waits(self) -> bool:
        """True when an online request has no first token yet; between passes SGLang's
        queue holds only online requests."""
        if self._view.waiting:
            return True
        return self._view.chunk is not None and not is_offline(self._view.chunk)

    def _offer(self, running_batch: ScheduleBatch) -> bool:
        """Offer as many offline requests as may run, where no other waits; False if none may."""
        scheduler, view = self._scheduler, self._view
        count = min(_MAX_OFFERED, scheduler.get_num_allocatable_reqs(len(running_batch.reqs)))
        limit = self._most_running
        if limit is not None:
            running = sum(is_offline(req) for req in (*running_batch.reqs, *view.elsewhere()))
            count = min(count, limit - running - (view.chunk is not None))
        if count <= 0:
            return False
        view.offer((), list(islice(self._waiting.reqs.values(), count)))
        return True

    def _release_offline_chunk(self) -> None:
        """Release a half-prefilled offline prompt: SGLang keeps one such prompt at a time,
        and would finish it before it looks at the waiting queue."""
        if self._view.can_take_chunk and is_offline(self._view.chunk):
            self._retraction.release(self._view.take_chunk())
            self._events["parked"] += 1

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

    def _end_pauses(self, running_batch: ScheduleBatch) -> None:
        """Let the requests wait that only a plan would have resumed."""
        if self._lane.suspended is not None:
            self._lane.drop()
        rids = {req.rid for req in self._view.paused_requests.reqs}
        self._retraction.retract(rids, running_batch)

    def _requeue_lost(self, running_batch: ScheduleBatch, launched: Sequence[Req]) -> None:
        """Release and requeue the requests that were on their way from one place to another."""
        placed = {id(req) for req in self._view.requests_with_kv(running_batch)}
        placed |= {id(req) for req in (*launched, *self._view.elsewhere())}
        online, offline = self._ledger.with_kv()
        for req in (*online, *offline):
            if id(req) not in placed and not req.finished():
                self._retraction.release(req)
