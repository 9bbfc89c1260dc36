"""What is known of requests is what is kept of them, after any sequence of events."""

from __future__ import annotations

from array import array
from http import HTTPStatus
from itertools import chain
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_coserve.core.request import Ending
from sglang_coserve.srt.marks.request_marks import CLASS_KEY
from sglang_coserve.srt.scheduler.request_endings import RequestEndings
from sglang_coserve.srt.steps.engine_requests import EngineRequests, ending_of

PLACES = ("waiting", "chunk", "running", "parked", "suspended", "leaving")
"""Where a request may be; which of them are SGLang's makes no difference here."""


class Requests(RuleBasedStateMachine):
    """Requests that come, move and end in every way, and an engine that listens."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, list[Any]] = {place: [] for place in PLACES}
        self.deferred: list[Any] = []
        self.told: list[tuple[str, Ending]] = []
        self.sent: list[Any] = []
        sender = SimpleNamespace(send_output=lambda output, _req=None: self.sent.append(output))
        self.engine = SimpleNamespace(
            ipc_channels=SimpleNamespace(send_to_tokenizer=sender),
            is_fully_idle=lambda: not any(self.places.values()),
        )
        self.requests = EngineRequests()
        self.endings = RequestEndings(
            self.engine, self.requests, kept=lambda: chain(*self.places.values()), tell=self.tell
        )
        self.lost: set[int] = set()
        self.num_lost = 0
        self.settled = True

    def tell(self, rid: str, ending: Ending) -> None:
        live = self.requests.get(rid)
        req = live.req
        assert ending is Ending.REFUSED or id(req) not in self.lost
        self.num_lost += id(req) in self.lost
        self.lost.discard(id(req))
        self.told.append((rid, ending))
        self.requests.forget(rid)
        again, self.deferred = self.deferred, []
        for each in again:
            self.enqueue(each)

    def enqueue(self, req: Any) -> None:
        if self.requests.namesake(req) is not None:
            self.deferred.append(req)
            return
        self.requests.add(req, 0.0)
        self.places["waiting"].append(req)

    def take(self, data: st.DataObject) -> Any:
        place = data.draw(st.sampled_from([p for p in PLACES if self.places[p]]))
        index = data.draw(st.integers(0, len(self.places[place]) - 1))
        return self.places[place].pop(index)

    @property
    def has_any(self) -> bool:
        return any(self.places.values())

    # --- What happens ------------------------------------------------------------------

    @rule(rid=st.sampled_from("abcde"), offline=st.booleans())
    def arrives(self, rid: str, offline: bool) -> None:
        params = SamplingParams(max_new_tokens=4)
        params.custom_params = {CLASS_KEY: "offline"} if offline else None
        self.enqueue(Req(rid, "", array("q", [1, 2]), params))

    @precondition(lambda self: self.has_any)
    @rule(data=st.data(), place=st.sampled_from(PLACES))
    def moves(self, data: st.DataObject, place: str) -> None:
        """It runs, is paused, suspended, dropped or retracted."""
        self.places[place].append(self.take(data))

    @precondition(lambda self: self.has_any)
    @rule(data=st.data())
    def finishes(self, data: st.DataObject) -> None:
        req = self.take(data)
        self.endings.forget(req, Ending.COMPLETE)
        # Its name may be another's by now, which must not be forgotten with it.
        self.endings.forget(req, Ending.COMPLETE)

    @precondition(lambda self: self.has_any)
    @rule(data=st.data(), refused=st.booleans())
    def is_answered(self, data: st.DataObject, refused: bool) -> None:
        """SGLang takes it out by itself: its queue is full, its client has left, …"""
        req = self.take(data)
        reason = {"type": "abort", "status_code": 503} if refused else None
        answer = AbortReq(rid=req.rid, finished_reason=reason)
        self.engine.ipc_channels.send_to_tokenizer.send_output(answer, req)
        assert self.sent[-1] is answer
        self.settled = False

    @rule(rid=st.sampled_from("abcde"))
    def a_message_is_refused(self, rid: str) -> None:
        """No request was made of it, and who has its name is not meant."""
        message = SimpleNamespace(rid=rid)
        self.engine.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=rid), message)

    @precondition(lambda self: self.has_any)
    @rule(data=st.data())
    def gets_lost(self, data: st.DataObject) -> None:
        self.lost.add(id(self.take(data)))

    @rule()
    def round_begins(self) -> None:
        self.endings.begin_round()
        self.settled = True

    @rule()
    def rounds_pass(self) -> None:
        for _ in range(256 + len(self.requests)):
            self.endings.begin_round()
        self.settled = True
        assert not self.lost

    @rule()
    def is_idle(self) -> None:
        self.endings.settle()
        self.settled = True
        self.endings.idle()
        if not self.has_any:
            assert not len(self.requests)

    # --- What holds ----------------------------------------------------------------------

    @invariant()
    def all_that_is_kept_is_known(self) -> None:
        for reqs in self.places.values():
            assert all(self.requests.live(req) is not None for req in reqs)

    @invariant()
    def all_that_is_known_is_kept_or_was_lost(self) -> None:
        kept = sum(map(len, self.places.values()))
        assert len(self.requests) >= kept + len(self.lost)
        if self.settled:
            assert len(self.requests) == kept + len(self.lost)

    @invariant()
    def only_what_got_lost_is_counted(self) -> None:
        assert self.endings.num_unnoticed == self.num_lost

    @invariant()
    def who_waits_for_a_name_waits_for_somebody(self) -> None:
        assert all(self.requests.namesake(req) is not None for req in self.deferred)


@pytest.mark.parametrize(
    ("reason", "ending"),
    [
        (FINISH_LENGTH(4), Ending.COMPLETE),
        (FINISH_ABORT(), Ending.ABORTED),
        (FINISH_ABORT("no such grammar", HTTPStatus.BAD_REQUEST), Ending.ABORTED),
        (FINISH_ABORT("no memory", HTTPStatus.INTERNAL_SERVER_ERROR), Ending.REFUSED),
    ],
)
def test_whom_an_end_is_held_against(reason: Any, ending: Ending) -> None:
    assert ending_of(reason.to_json()) is ending
    assert ending_of(None) is Ending.ABORTED


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
