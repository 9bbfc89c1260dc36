"""What the scheduler is told of a request's arrival."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from sglang_coserve.srt.marks.request_marks import arrival_s
from sglang_coserve.srt.tokenizer.client_presence import ArrivalTimeStats


def test_a_request_arrived_when_the_server_got_it() -> None:
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

    sent = ArrivalTimeStats()
    sent.set_created_time(10.0)
    received = SchedulerReqTimeStats.new_from_obj(pickle.loads(pickle.dumps(sent)))
    assert arrival_s(SimpleNamespace(time_stats=received), 1e6) == pytest.approx(10.0, abs=0.01)
