"""Online requests whose prompts share nothing, and offline ones that fill an engine."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager

import httpx

from chaos_bench.online_stream import OnlineRequest

PROMPT_WORDS = 48
ONLINE_TOKENS = 16
OFFLINE_TOKENS = 400
GIVE_UP_S = 180.0
POLL_S = 0.2


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
