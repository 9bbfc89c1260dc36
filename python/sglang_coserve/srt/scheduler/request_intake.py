"""The intake of requests: online ones go to SGLang's queue, offline ones to the admission."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from sglang_coserve.srt.admission.admission import Admission
from sglang_coserve.srt.compat import lowest_priority, refuse, send_abort
from sglang_coserve.srt.marks.offline_marks import restore_generated
from sglang_coserve.srt.marks.request_marks import is_offline, sent_s
from sglang_coserve.srt.optional_parts import GUARD
from sglang_coserve.srt.request_moves import RequestMoves
from sglang_coserve.srt.scheduler.request_endings import RequestEndings
from sglang_coserve.srt.steps.engine_parts import EngineParts
from sglang_coserve.srt.steps.step_record import Reception

Req = Any

logger = logging.getLogger(__name__)


class RequestIntake:
    """Puts online requests into SGLang's queue, and offline ones into that of the admission."""

    def __init__(
        self,
        parts: EngineParts,
        admission: Admission,
        moves: RequestMoves,
        endings: RequestEndings,
    ) -> None:
        self._scheduler = parts.scheduler
        self._admission = admission
        self._queues = parts.queues
        self._moves = moves
        self._clock = parts.clock
        self._requests = parts.requests
        self._events = parts.events
        self._endings = endings
        self._deferred: dict[str, list[Req]] = {}
        """By rid: requests that arrived while another one with that rid was still here."""

    def take_in(self, recv_req: Any, handle: Callable[[Any], None]) -> None:
        """Let SGLang ``handle`` a request; if that raises, refuse the request."""
        try:
            GUARD.check_logit_processor(recv_req)
            handle(recv_req)
        except Exception as error:
            self._refuse(recv_req, error)
        self._endings.settle()  # SGLang may have refused it, or another one for it.

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
            self._queues.remove_waiting(req.rid)
            self._endings.forget(req)
            self._refuse(req, error)

    def _queue(self, req: Req, is_retracted: bool, enqueue: Callable[[Req, bool], None]) -> None:
        if self._requests.namesake(req) is not None:
            self._deferred.setdefault(req.rid, []).append(req)
            return
        now_s = self._clock.now_s()
        info = self._requests.add(req, self._clock.arrival_s(req, now_s), _reception(req))
        # A request that failed validation is answered by SGLang, whatever its class.
        if is_offline(req) and req.to_finish is None:
            self._enqueue_offline(req)
        else:
            if info.is_online and not is_retracted:
                self._admission.arrived(req, info)
            with self._queues.own_queue():
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
            self._endings.forget(req)
        self._events["aborted_waiting"] += len(aborted)
        for req in (*aborted, *deferred):
            send_abort(self._scheduler, req)
        self._endings.settle()

    def _abort_in_sglang(self, recv_req: AbortReq, abort: Callable[[AbortReq], None]) -> None:
        """Let SGLang abort one request; O(requests in batches), and a search in C among the others.

        SGLang looks at every request of its queue, and takes those whose names begin like that for
        ones that are meant.
        """
        live = self._requests.get(recv_req.rid)
        with self._queues.showing_only(None if live is None else live.req):
            others = {
                id(req): (req, req.rid)
                for req in self._queues.placed()
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


def _reception(req: Req) -> Reception:
    queued_s = time.perf_counter()
    received_s: float = req.time_stats.scheduler_recv_time
    compiled_from_s = None if req.grammar is None else received_s
    return Reception(sent_s(req), compiled_from_s, queued_s)
