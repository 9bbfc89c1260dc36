"""The ends of requests, however they come: every part forgets a request that has ended.

A request ends in one of three ways:

1. The results of its last batch say so, or a part takes the request out. The part calls ``forget``.
2. SGLang ends the request outside of its batches. The queue is full, or a request of a higher
   priority displaces it; it waited for too long; it is aborted while it waits or between two
   chunks; it is the last one and does not fit. SGLang then sends an ``AbortReq`` to the client, and
   the end is noticed by this message.
3. The request is in no place any more, and neither has happened. The case is a fault, so it is
   counted and held against the server. All requests are looked for at a bounded interval.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

from sglang.srt.managers.io_struct import AbortReq

from sglang_coserve.core.request import Ending
from sglang_coserve.srt.compat import send_abort
from sglang_coserve.srt.steps.engine_requests import EngineRequests, ending_of

Req = Any

logger = logging.getLogger(__name__)

_CHECK_ROUNDS: Final = 256
"""Scheduling rounds between two checks: a few seconds."""

_CHECKED_PER_ROUND: Final = 16
"""Requests looked at in a round, on average over many, of which each takes some 0.2 µs."""


class RequestEndings:
    """See the module's docstring."""

    def __init__(
        self,
        scheduler: Any,
        requests: EngineRequests,
        *,
        kept: Callable[[], Iterable[Req]],
        tell: Callable[[str, Ending], None],
    ) -> None:
        """Listen to the aborts that ``scheduler`` answers.

        ``kept`` returns every request that is kept anywhere, when no round is under way. ``tell``
        has all parts forget the request with this rid, the register among them.
        """
        self._scheduler = scheduler
        self._requests = requests
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
        if self._requests.live(req) is not None:
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
        if self._requests.live(req) is not None:
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
        if self._rounds >= _CHECK_ROUNDS + len(self._requests) // _CHECKED_PER_ROUND:
            self.check()

    def idle(self) -> None:
        """Check when nothing runs or waits any more; O(1) if, as it should be, none is known."""
        if len(self._requests) and self._scheduler.is_fully_idle():
            self.check()

    def check(self) -> None:
        """Forget the requests that are nowhere any more. O(requests)."""
        self.settle()
        self._rounds = 0
        here = set(map(id, self.kept()))
        gone = [live.req for live in self._requests if id(live.req) not in here]
        for req in gone:
            logger.warning("request %s has left the engine, and nobody has said so", req.rid)
            self.forget(req, Ending.REFUSED)
        self.num_unnoticed += len(gone)
