"""Lines that a gateway sends to a real engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from batch.route_calls import completed, text_of
from sglang_coserve.http_lines.engine_connection import EngineConnection
from sglang_coserve.lines.backend import LineMovedError, LineRequest
from srt.batch_server.deployment import ADMIN_KEY, COMPLETIONS, Deployment, create, line
from waiting import GIVE_UP_S

GREEDY = {"model": "small", "temperature": 0, "ignore_eos": True}


def request(max_tokens: int, generated: Sequence[int] = (), **extra: Any) -> LineRequest:
    body = {**GREEDY, "prompt": "The id of the old mill", "max_tokens": max_tokens, **extra}
    return LineRequest("batch_1", 1, COMPLETIONS, body, tuple(generated))


def running(deployment: Deployment) -> int:
    offline = deployment.status()["replicas"][0]["offline"]
    return int(offline["running"]) + int(offline["waiting"])


async def test_a_line_is_answered_as_in_a_batch_and_goes_on_after_its_tokens(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    batch = create(client, line("id", 90).encode())
    (record,) = completed(client, batch.id).values()
    async with asyncio.timeout(GIVE_UP_S):
        async with EngineConnection(deployment.base_url, ADMIN_KEY) as connection:
            model = (await connection.describe()).model
            heard: list[int] = []
            first = await connection.run(request(90), model, heard.extend)
            assert first.body["choices"][0]["text"] == text_of(record)
            assert 0 < len(heard) < 90
            again: list[int] = []
            second = await connection.run(request(90, heard), model, again.extend)
            assert second.body["choices"] == first.body["choices"]
            assert second.body["usage"]["completion_tokens"] == 90
            assert len(again) < 90 - len(heard)
            marked = request(9, custom_params={"_coserve_generated": [1]})
            refused = await connection.run(marked, model, heard.extend)
            assert (refused.status_code, refused.is_retryable) == (400, False)
            assert "_coserve_generated" in refused.body["error"]["message"]
            with pytest.raises(LineMovedError, match="the line is of older weights"):
                await connection.run(request(9), "older weights", heard.extend)


async def test_a_closed_connection_ends_the_request(deployment: Deployment) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        async with EngineConnection(deployment.base_url, ADMIN_KEY) as connection:
            model = (await connection.describe()).model
            attempt = asyncio.ensure_future(connection.run(request(900), model, lambda _: None))
            while not await asyncio.to_thread(running, deployment):
                await asyncio.sleep(0.02)
            attempt.cancel()
            start_s = time.monotonic()
            while await asyncio.to_thread(running, deployment):
                await asyncio.sleep(0.02)
            assert time.monotonic() - start_s < GIVE_UP_S
