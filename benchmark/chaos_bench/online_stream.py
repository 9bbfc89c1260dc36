"""Online requests through a router, each streamed to its end."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import httpx

__all__ = ["OnlineAnswer", "OnlineRequest", "online_requests"]

_GIVE_UP_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class OnlineRequest:
    """A greedy request of an online user."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class OnlineAnswer:
    """What became of an online request; times are on the monotonic clock."""

    request: OnlineRequest
    start_s: float
    first_token_s: float | None
    end_s: float
    text: str
    engine: str | None
    """Its ``--weight-version``; None when no token came."""

    failure: str | None
    """None when the answer came to its end."""


async def online_requests(
    base_url: str,
    requests: Iterator[OnlineRequest],
    *,
    per_s: float,
    seed: int,
    is_over: Callable[[], bool],
) -> list[OnlineAnswer]:
    """Stream requests that arrive at random times until it is over; wait for all answers."""
    rng = random.Random(seed)
    async with _client(base_url) as client, asyncio.TaskGroup() as tasks:
        sent = []
        while not is_over():
            sent.append(tasks.create_task(_answer(client, next(requests))))
            await asyncio.sleep(rng.expovariate(per_s))
    return [task.result() for task in sent]


async def _answer(client: httpx.AsyncClient, request: OnlineRequest) -> OnlineAnswer:
    body = {
        "text": request.prompt,
        "stream": True,
        "sampling_params": {
            "max_new_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        },
    }
    start_s = time.monotonic()
    first_token_s, text, engine = None, "", None
    failure: str | None = "the stream ended early"
    try:
        async with client.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                failure = f"{response.status_code} {(await response.aread())[:120]!r}"
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    failure = None
                elif line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "text" not in event:
                        failure = line[:120]
                        break
                    first_token_s = first_token_s or time.monotonic()
                    text, engine = event["text"], event["meta_info"]["weight_version"]
    except httpx.HTTPError as error:
        failure = repr(error)
    return OnlineAnswer(request, start_s, first_token_s, time.monotonic(), text, engine, failure)


def _client(base_url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=base_url, timeout=_GIVE_UP_S, limits=limits, trust_env=False)
