"""Online requests through a router, and offline ones that fill an engine."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from httpx_sse import EventSource

PROMPT_WORDS = 48
ONLINE_TOKENS = 16
OFFLINE_TOKENS = 400
GIVE_UP_S = 180.0
POLL_S = 0.2


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
                said = f"{response.status_code} {(await response.aread())[:120]!r}"
                return OnlineAnswer(request, start_s, None, time.monotonic(), "", None, said)
            async for event in EventSource(response).aiter_sse():
                if event.data == "[DONE]":
                    failure = None
                    continue
                found = event.json()
                if "text" not in found:
                    failure = event.data[:120]
                    break
                first_token_s = first_token_s or time.monotonic()
                text, engine = found["text"], found["meta_info"]["weight_version"]
    except httpx.HTTPError as error:
        failure = repr(error)
    return OnlineAnswer(request, start_s, first_token_s, time.monotonic(), text, engine, failure)


def _client(base_url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=base_url, timeout=GIVE_UP_S, limits=limits, trust_env=False)


def unshared_requests(seed: int) -> Iterator[OnlineRequest]:
    """Yield requests for ever, whose prompts share nothing."""
    rng = random.Random(seed)
    while True:
        words = (f"w{rng.randrange(10**6)}" for _ in range(PROMPT_WORDS))
        yield OnlineRequest(" ".join(words), ONLINE_TOKENS)


@asynccontextmanager
async def full_of_offline_work(engine_url: str, *, requests: int) -> AsyncGenerator[None]:
    """Within it so many offline requests are at an engine at any time; its memory is full.

    Raises:
        TimeoutError: they do not fill it.
    """

    async def work(client: httpx.AsyncClient, number: int) -> None:
        body = {
            "text": f"Line {number} of the old mill",
            "sampling_params": {
                "max_new_tokens": OFFLINE_TOKENS,
                "ignore_eos": True,
                "custom_params": {"coserve_class": "offline"},
            },
        }
        while True:
            (await client.post("/generate", json=body)).raise_for_status()

    async with httpx.AsyncClient(base_url=engine_url, timeout=GIVE_UP_S) as client:
        tasks = [asyncio.create_task(work(client, number)) for number in range(requests)]
        try:
            await wait_until(engine_url, lambda offline: min(offline) > 1)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await wait_until(engine_url, lambda offline: max(offline) == 0)


async def wait_until(engine_url: str, holds: Callable[[tuple[int, int]], bool]) -> None:
    """Wait for what an engine has of offline requests, running and waiting.

    Raises:
        TimeoutError: it was in vain.
    """
    give_up_s = time.monotonic() + GIVE_UP_S
    async with httpx.AsyncClient(base_url=engine_url, timeout=GIVE_UP_S) as client:
        while True:
            status = (await client.get("/coserve/status")).json()
            (replica,) = status["replicas"]
            if holds((replica["offline"]["running"], replica["offline"]["waiting"])):
                return
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{engine_url} has {replica['offline']}")
            await asyncio.sleep(POLL_S)
