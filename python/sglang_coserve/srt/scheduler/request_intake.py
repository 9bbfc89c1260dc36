"""Requests of both classes in the scheduler, from their arrival to their end, however they end.

Whoever ends here is forgotten by all parts:

1. The results of its last batch say so, or whoever takes it out here: they call ``forget``.
2. SGLang ends it outside of its batches: it is refused as the queue is full, or displaced by one of
   a higher priority; it waited for too long; it is aborted while it waits or between two chunks; it
   is the last one and does not fit. Its client then gets an ``AbortReq``, by which it is noticed.
3. It is nowhere any more, and neither has happened. That is a fault, so it is counted, and held
   against the server; all requests are looked for at a bounded interval.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Final

from sglang.srt.managers.io_struct import AbortReq

from sglang_coserve.core.request import Ending
from sglang_coserve.srt.admission.admission import Admission
from sglang_coserve.srt.compat import lowest_priority, refuse, send_abort
from sglang_coserve.srt.marks.offline_marks import restore_generated
from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.optional_parts import GUARD
from sglang_coserve.srt.request_moves import RequestMoves
from sglang_coserve.srt.steps.engine_parts import EngineParts
from sglang_coserve.srt.steps.request_ledger import RequestLedger, ending_of

_CHECK_ROUNDS: Final = 256
"""Scheduling rounds between two checks: a few seconds."""

_CHECKED_PER_ROUND: Final = 16
"""Requests looked at in a round, on average over many, of which each takes some 0.2 µs."""


class LiveRequests:
    """See the module's docstring."""

    def __init__(
        self,
        scheduler: Any,
        ledger: RequestLedger,
        *,
        kept: Callable[[], Iterable[Req]],
        tell: Callable[[str, Ending], None],
    ) -> None:
        """Listen to the aborts that ``scheduler`` answers.

        ``kept`` returns every request that is kept anywhere, when no round is under way. ``tell``
        has all parts forget the request with this rid, the ledger among them.
        """
        self._scheduler = scheduler
        self._ledger = ledger
        self.kept = kept
        self._tell = tell
        self._answered: list[tuple[Req, Ending]] = []
        """Aborted requests that the parts have not been told of."""

        self._rounds = 0
        self.num_unnoticed = 0
        """Requests whose end was found by a check alone."""

        sender = scheduler.ipc_channels.send_to_tokenizer
        send = sender.send_output

        def send_output(output: Any, recv_obj: Any = None) -> None:
            if isinstance(output, AbortReq):
                self._note(recv_obj, output)
            send(output, recv_obj)

        sender.send_output = send_output

    def _note(self, req: Any, answer: AbortReq) -> None:
        # A message of which no request was made has the rid, but is none.
        if self._ledger.live(req) is not None:
            self._answered.append((req, ending_of(answer.finished_reason)))

    def answer_aborted(self, req: Req) -> None:
        """Answer a request that is aborted in no batch; ``settle`` forgets it."""
        send_abort(self._scheduler, req)
        self._answered.append((req, Ending.ABORTED))

    def forget(self, req: Req, ending: Ending = Ending.ABORTED) -> None:
        """Have all parts forget a request that has ended; does nothing if they have already.

        Under overlap scheduling a request is in one more batch after its end. By then another
        may have its id.
        """
        if self._ledger.live(req) is not None:
            self._tell(req.rid, ending)

    def settle(self) -> None:
        """Forget the requests whose abort was answered. Not while a batch is being prepared."""
        while self._answered:
            # A name that becomes free may let in a request that is refused.
            answered, self._answered = self._answered, []
            for req, ending in answered:
                self.forget(req, ending)

    def begin_round(self) -> None:
        """Settle, and check if that is due. Amortized O(1)."""
        self.settle()
        self._rounds += 1
        if self._rounds >= _CHECK_ROUNDS + len(self._ledger) // _CHECKED_PER_ROUND:
            self.check()

    def idle(self) -> None:
        """Check when nothing runs or waits any more; O(1) if, as it should be, none is known."""
        if len(self._ledger) and self._scheduler.is_fully_idle():
            self.check()

    def check(self) -> None:
        """Forget the requests that are nowhere any more. O(requests)."""
        self.settle()
        self._rounds = 0
        here = set(map(id, self.kept()))
        gone = [live.req for live in self._ledger if id(live.req) not in here]
        for req in gone:
            logger.warning("request %s has left the engine, and nobody has said so", req.rid)
            self.forget(req, Ending.REFUSED)
        self.num_unnoticed += len(gone)


Req = Any

logger = logging.getLogger(__name__)


class RequestIntake:
    """Puts online requests into SGLang's queue, and offline ones into that of the admission."""

    def __init__(
        self, parts: EngineParts, admission: Admission, moves: RequestMoves, live: LiveRequests
    ) -> None:
        self._scheduler = parts.scheduler
        self._admission = admission
        self._view = parts.view
        self._moves = moves
        self._clock = parts.clock
        self._ledger = parts.ledger
        self._events = parts.events
        self._live = live
        self._deferred: dict[str, list[Req]] = {}
        """By rid: requests that arrived while another one with that rid was still here."""

    def take_in(self, recv_req: Any, handle: Callable[[Any], None]) -> None:
        """Let SGLang ``handle`` a request; if that raises, refuse the request."""
        try:
            GUARD.check_logit_processor(recv_req)
            handle(recv_req)
        except Exception as error:
            self._refuse(recv_req, error)
        self._live.settle()  # SGLang may have refused it, or another one for it.

    def enqueue(self, req: Req, is_retracted: bool, enqueue: Callable[[Req, bool], None]) -> None:
        """Queue a request, which may have run before; ``enqueue`` is SGLang's method.

        A client may reuse a rid as soon as it has the answer, or has disconnected. The request
        is then deferred until the scheduler, too, is done with the previous one.

        SGLang calls this from within its steps, too (when a grammar is ready, after a retraction),
        so a request that cannot be queued is refused here, and ends nothing but itself.
        """
        try:
            self._queue(req, is_retracted, enqueue)
        except Exception as error:
            self._admission.remove(lambda waiting: waiting is req)
            self._view.remove_waiting(req.rid)
            self._live.forget(req)
            self._refuse(req, error)

    def _queue(self, req: Req, is_retracted: bool, enqueue: Callable[[Req, bool], None]) -> None:
        if self._ledger.namesake(req) is not None:
            self._deferred.setdefault(req.rid, []).append(req)
            return
        now_s = self._clock.now_s()
        info = self._ledger.add(req, self._clock.arrival_s(req, now_s))
        # A request that failed validation is answered by SGLang, whatever its class.
        if is_offline(req) and req.to_finish is None:
            self._enqueue_offline(req)
        else:
            if info.is_online and not is_retracted:
                self._admission.arrived(req, info)
            with self._view.own_queue():
                enqueue(req, is_retracted)

    def _refuse(self, request: Any, error: Exception) -> None:
        """Answer SGLang's ``Req``, or the message of which none could be made."""
        logger.error("request %s could not be taken in", request.rid, exc_info=error)
        # Not by way of the queue: it may have been the one that did not take it.
        message = f"the engine cannot take this request: {error}"
        refuse(self._scheduler, request, HTTPStatus.BAD_REQUEST, message)

    def _enqueue_offline(self, req: Req) -> None:
        scheduler = self._scheduler
        if scheduler.enable_priority_scheduling:
            req.priority = lowest_priority(scheduler.schedule_low_priority_values_first)
        if not scheduler._set_or_validate_priority(req):
            return
        req.time_stats.set_wait_queue_entry_time()
        restore_generated(req, scheduler.model_config.think_end_ids)
        if not self._moves.come(req):
            self._admission.enqueue(req)
        self._events["put_back" if req.retraction_count else "received"] += 1

    def name_is_free(self, rid: str) -> None:
        """Queue the requests that were deferred because of this rid."""
        if rid in self._deferred:
            # All of them; those after the first are deferred again.
            for req in self._deferred.pop(rid):
                self._scheduler._add_request_to_queue(req)

    def abort(self, recv_req: AbortReq, abort: Callable[[AbortReq], None]) -> None:
        """Abort requests in any state: SGLang's with ``abort``, the waiting offline ones here."""

        deferred = self._take_deferred(recv_req)
        if recv_req.abort_all:
            abort(recv_req)
            aborted = self._admission.remove(lambda _: True) + self._moves.remove(lambda _: True)
        else:
            self._abort_in_sglang(recv_req, abort)
            aborted = self._admission.remove_named(recv_req.rid)
            aborted += self._moves.remove(lambda req: req.rid == recv_req.rid)
        for req in aborted:
            self._live.forget(req)
        self._events["aborted_waiting"] += len(aborted)
        for req in (*aborted, *deferred):
            send_abort(self._scheduler, req)
        self._live.settle()

    def _abort_in_sglang(self, recv_req: AbortReq, abort: Callable[[AbortReq], None]) -> None:
        """Let SGLang abort one request; O(requests in batches), and a search in C among the others.

        SGLang looks at every request of its queue, and takes those whose names begin like that for
        ones that are meant.
        """
        live = self._ledger.get(recv_req.rid)
        with self._view.showing_only(None if live is None else live.req):
            others = {
                id(req): (req, req.rid)
                for req in self._view.placed()
                if req.rid.startswith(recv_req.rid) and req.rid != recv_req.rid
            }
            for req, _ in others.values():
                req.rid = ""
            try:
                abort(recv_req)
            finally:
                for req, rid in others.values():
                    req.rid = rid

    def _take_deferred(self, recv_req: AbortReq) -> list[Req]:
        """Remove and return the deferred requests that are to be aborted."""
        rids = list(self._deferred) if recv_req.abort_all else [recv_req.rid]
        return [req for rid in rids for req in self._deferred.pop(rid, ())]
