"""Online requests and probes from a process of their own, which notes how long each took.

Another process, since one that also sends large bodies would take its own pauses for the
server's.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.synchronize import Event
from typing import Any, Final

import httpx
import orjson

from chaos_bench.answers import KnownAnswer, answered_text
from chaos_bench.observation import ChaosError, Observation

__all__ = ["Prober"]

_PROBE_EVERY_S: Final = 0.02
_TIMEOUT_S: Final = 20.0
_END_TIMEOUT_S: Final = 60.0
_RETRY_S: Final = 0.1


class Prober:
    """Probes from ``start`` to ``stop``."""

    def __init__(
        self,
        base_url: str,
        control_url: str,
        known: Sequence[KnownAnswer],
        streams: int,
        seed: int,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._connection, remote = context.Pipe(duplex=False)
        arguments = (base_url, control_url, list(known), streams, seed, self._stop, remote)
        self._process = context.Process(target=_run, args=arguments, daemon=True)

    def start(self) -> None:
        """Begin to probe."""
        self._process.start()

    def stop(self) -> list[Observation]:
        """End, and return what was seen.

        Raises:
            ChaosError: the process has died.
        """
        self._stop.set()
        try:
            if not self._connection.poll(_END_TIMEOUT_S):
                raise ChaosError("the probing process does not end")
            seen: list[Observation] = self._connection.recv()
        except EOFError:
            raise ChaosError("the probing process has died") from None
        finally:
            self._process.kill()
            self._process.join()
        return seen


def _run(
    base_url: str,
    control_url: str,
    known: Sequence[KnownAnswer],
    streams: int,
    seed: int,
    stop: Event,
    connection: Any,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Whoever started this process ends it.
    seen: list[Observation] = []
    asyncio.run(_probe_all(base_url, control_url, known, streams, seed, stop, seen))
    connection.send(seen)


async def _probe_all(
    base_url: str,
    control_url: str,
    known: Sequence[KnownAnswer],
    streams: int,
    seed: int,
    stop: Event,
    seen: list[Observation],
) -> None:
    async with httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_S, trust_env=False) as client:
        tasks = [
            asyncio.create_task(_probe(client, "ping", "/ping", seen)),
            asyncio.create_task(_probe(client, "control", control_url, seen)),
            asyncio.create_task(_probe(client, "health", "/health", seen)),
            *(
                asyncio.create_task(_stream(client, known, random.Random(seed + i), seen))
                for i in range(streams)
            ),
        ]
        while not stop.is_set():
            await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)


async def _probe(client: httpx.AsyncClient, kind: str, path: str, seen: list[Observation]) -> None:
    while True:
        start_s = time.monotonic()
        try:
            status = (await client.get(path)).status_code
        except httpx.HTTPError:
            status = 0
        seen.append(Observation(kind, start_s, time.monotonic(), status))
        await asyncio.sleep(_RETRY_S if status == 0 else _PROBE_EVERY_S)


async def _stream(
    client: httpx.AsyncClient,
    known: Sequence[KnownAnswer],
    rng: random.Random,
    seen: list[Observation],
) -> None:
    while True:
        answer = rng.choice(known)
        start_s = last_s = time.monotonic()
        text, status, detail, is_whole, is_aborted = "", 0, "", False, False
        try:
            async with client.stream(
                "POST", answer.path, json=answer.body(stream=True)
            ) as response:
                status = response.status_code
                if status != 200:
                    detail = (await response.aread()).decode(errors="replace")[:300]
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        is_whole = True
                    elif line.startswith("data: {"):
                        now_s = time.monotonic()
                        if text:
                            seen.append(Observation("gap", last_s, now_s, status))
                        last_s = now_s
                        choices = orjson.loads(line.removeprefix("data: ")).get("choices") or [{}]
                        text += answered_text(choices[0])
                        is_aborted |= choices[0].get("finish_reason") == "abort"
        except httpx.HTTPError:
            pass
        if status == 200 and (is_aborted or not is_whole):
            status = 0
        is_different = status == 200 and text != answer.text
        end_s = time.monotonic()
        seen.append(Observation("stream", start_s, end_s, status, is_different, detail))
        if status != 200:
            await asyncio.sleep(_RETRY_S)
