"""A server's batches go on in a gateway that opens their directory, after the same tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

from batch.scenarios import OWNER, lines, stream, wanted
from batch.scripted_backend import ScriptedBackend
from fleet.test_backend import finish_all, fleet_of
from http_lines.live_engine import LiveEngine
from sglang_coserve.batch.service import BatchService
from waiting import GIVE_UP_S, until

NUM_LINES = 6


async def test_batches_of_a_server_go_on_in_a_gateway(tmp_path: Path) -> None:
    data, server = tmp_path / "data", ScriptedBackend(holds=True)
    async with await BatchService.open(data, server) as service:
        file = await service.create_file(OWNER, "in.jsonl", stream(lines(NUM_LINES, max_tokens=6)))
        batch = await service.create_batch(OWNER, wanted(file))
        await until(lambda: len(server.in_flight) == NUM_LINES)
        server.in_flight[0].finish()
        for entry in server.in_flight:
            entry.generate(2)
    async with (
        fleet_of(engine := LiveEngine()) as fleet,
        await BatchService.open(data, fleet) as service,
        asyncio.timeout(GIVE_UP_S),
    ):
        await engine.holds(NUM_LINES - 1)
        generated = [len(entry.request.generated) for entry in engine.backend.in_flight]
        assert generated == [2] * (NUM_LINES - 1)
        finish_all(engine)
        while batch.status != "completed":
            await asyncio.sleep(0.02)
            batch = await service.retrieve_batch(OWNER, batch.id)
        assert batch.request_counts.completed == NUM_LINES
