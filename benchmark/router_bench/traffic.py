"""Online requests through a router, and offline ones that fill an engine behind it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx

from common.failures import RunFailedError

__all__ = ["OnlineRun", "full_of_offline_work", "online_requests", "wait_until"]

PROMPT_WORDS: Final = 48
ONLINE_TOKENS: Final = 16
OFFLINE_TOKENS: Final = 400
_GIVE_UP_S: Final = 180.0
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class OnlineRun:
    """What became of the online requests of one run."""

    ttfts_s: tuple[float, ...]
    """Of those that were answered."""

    by_engine: Counter[str]
    """How many each engine answered, by its ``--weight-version``."""

    failures: tuple[str, ...]


async def online_requests(base_url: str, *, per_s: float, seconds: float, seed: int) -> OnlineRun:
    """Send streamed requests at random times, with prompts that share nothing, and time them."""
    chance = random.Random(seed)
    ttfts_s: list[float] = []
    by_engine: Counter[str] = Counter()
    failures: list[str] = []

    async def send(client: httpx.AsyncClient, text: str) -> None:
        body = {
            "text": text,
            "stream": True,
            "sampling_params": {"max_new_tokens": ONLINE_TOKENS, "ignore_eos": True},
        }
        sent_s, engine = time.perf_counter(), None
        try:
            async with client.stream("POST", "/generate", json=body) as response:
                if response.status_code != 200:
                    failures.append(f"{response.status_code} {(await response.aread())[:120]!r}")
                    return
                async for line in response.aiter_lines():
                    if engine is None and line.startswith("data: {"):
                        ttfts_s.append(time.perf_counter() - sent_s)
                        event = json.loads(line.removeprefix("data: "))
                        engine = event["meta_info"]["weight_version"]
        except httpx.HTTPError as error:
            failures.append(repr(error))
        if engine is not None:
            by_engine[engine] += 1

    async with _client(base_url) as client, asyncio.TaskGroup() as tasks:
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            text = " ".join(f"w{chance.randrange(10**6)}" for _ in range(PROMPT_WORDS))
            tasks.create_task(send(client, text))
            await asyncio.sleep(chance.expovariate(per_s))
    return OnlineRun(tuple(ttfts_s), by_engine, tuple(failures))


@asynccontextmanager
async def full_of_offline_work(engine_url: str, *, requests: int) -> AsyncGenerator[None]:
    """Within it so many offline requests are at an engine at any time; its memory is full.

    Raises:
        RunFailedError: they do not fill it.
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

    async with _client(engine_url) as client:
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
        RunFailedError: it was in vain.
    """
    give_up_s = time.monotonic() + _GIVE_UP_S
    async with _client(engine_url) as client:
        while True:
            status: dict[str, Any] = (await client.get("/coserve/status")).json()
            (replica,) = status["replicas"]
            if holds((replica["offline"]["running"], replica["offline"]["waiting"])):
                return
            if time.monotonic() > give_up_s:
                raise RunFailedError(f"{engine_url} has {replica['offline']}")
            await asyncio.sleep(_POLL_S)


def _client(base_url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=base_url, timeout=_GIVE_UP_S, limits=limits, trust_env=False)
