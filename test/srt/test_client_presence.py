"""When a request came, and what is ended with a client that leaves."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_coserve.srt.marks.request_marks import arrival_s
from sglang_coserve.srt.tokenizer.client_presence import ArrivalTimeStats, ClientDepartures


def test_a_request_arrived_when_the_server_got_it() -> None:
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

    sent = ArrivalTimeStats()
    sent.set_created_time(10.0)
    received = SchedulerReqTimeStats.new_from_obj(pickle.loads(pickle.dumps(sent)))
    assert arrival_s(SimpleNamespace(time_stats=received), 1e6) == pytest.approx(10.0, abs=0.01)


class Manager:
    """Requests that are aborted at once."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.rid_to_state: dict[str, Any] = {}

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)

    def request(self, rid: str, lora_id: str | None = None) -> Any:
        self.rid_to_state[rid] = SimpleNamespace(dispatched=False)
        return SimpleNamespace(rid=rid, lora_id=lora_id)


async def receive() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def test_all_that_a_client_has_is_aborted_when_it_leaves_and_nothing_is_sent_later() -> None:
    manager = Manager()
    departures = ClientDepartures(manager)
    async with departures.watched(SimpleNamespace(receive=receive)):
        for rid in ("a", "b"):
            departures.sending(manager.request(rid))
        await asyncio.sleep(0.01)
        assert manager.aborted == ["a", "b"]
        with pytest.raises(ValueError, match="its client has left"):
            departures.sending(manager.request("late"))


async def test_a_request_with_an_adapter_is_sent_and_aborted_after_its_client_has_left() -> None:
    """SGLang would wait for ever to unload the adapter of a choice that was not sent."""
    manager = Manager()
    departures = ClientDepartures(manager)
    async with departures.watched(SimpleNamespace(receive=receive)):
        await asyncio.sleep(0.01)
        departures.sending(manager.request("late", "poet"))
        await asyncio.sleep(0.05)
        assert manager.aborted == []
        manager.rid_to_state["late"].dispatched = True
        while not manager.aborted:
            await asyncio.sleep(0.01)
    assert manager.aborted == ["late"]
