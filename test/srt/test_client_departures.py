"""What is ended with a client that leaves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from sglang_coserve.srt.tokenizer.client_presence import ClientDepartures


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
