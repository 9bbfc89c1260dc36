"""When a request came, and what is ended with a client that leaves."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace

import pytest

from sglang_coserve.srt.marks.request_marks import arrival_s
from sglang_coserve.srt.tokenizer.client_presence import ArrivalTimeStats, ClientDepartures


def test_a_request_arrived_when_the_server_got_it() -> None:
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

    sent = ArrivalTimeStats()
    sent.set_created_time(10.0)
    received = SchedulerReqTimeStats.new_from_obj(pickle.loads(pickle.dumps(sent)))
    assert arrival_s(SimpleNamespace(time_stats=received), 1e6) == pytest.approx(10.0, abs=0.01)


async def test_all_that_a_client_has_is_aborted_when_it_leaves_and_nothing_is_sent_later() -> None:
    aborted: list[str] = []
    departures = ClientDepartures(aborted.append)

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async with departures.watched(SimpleNamespace(receive=receive)):
        for rid in ("a", "b"):
            departures.sending(rid)
        await asyncio.sleep(0.01)
        assert aborted == ["a", "b"]
        with pytest.raises(ValueError, match="its client has left"):
            departures.sending("late")
