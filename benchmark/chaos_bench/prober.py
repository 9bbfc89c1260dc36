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
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any, Final

import httpx
import orjson
from httpx_sse import EventSource

from chaos_bench.answers import KnownAnswer, answered_text
from chaos_bench.figures import ChaosError, Observation

_PROBE_EVERY_S: Final = 0.02
_TIMEOUT_S: Final = 20.0
_ARRIVAL_TIMEOUT_S: Final = 180.0
"""Longer than an engine is frozen or started again."""

_ANSWER_TIMEOUT_S: Final = 240.0
"""Of the process: more than a request may take."""

_RETRY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Probes:
    """What is sent."""

    base_url: str
    known: Sequence[KnownAnswer]
    seed: int
    streams: int = 0
    """Online streams at a time, each of which follows another; the end breaks them off."""

    arrivals_per_s: float = 0.0
    """Online streams that begin at random times, on average; the end waits for them."""

    asks_routes: bool = False
    """Routes without work, and of one token, are asked all the time."""


class Prober:
    """Sends from ``start`` to ``stop``."""

    def __init__(self, probes: Probes) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._connection, remote = context.Pipe(duplex=False)
        arguments = (probes, self._stop, remote)
        self._process = context.Process(target=_run, args=arguments, daemon=True)

    def start(self) -> None:
        """Begin, and return once the process sends.

        Raises:
            ChaosError: the process has died.
        """
        self._process.start()
        self._told()

    def stop(self) -> list[Observation]:
        """End, and return what was seen.

        Raises:
            ChaosError: the process has died.
        """
        self._stop.set()
        try:
            seen: list[Observation] = self._told()
        finally:
            self._process.kill()
            self._process.join()
        return seen

    def _told(self) -> Any:
        """Return what the process says next."""
        try:
            if not self._connection.poll(_ANSWER_TIMEOUT_S):
                raise ChaosError("the probing process does not start or end")
            return self._connection.recv()
        except EOFError:
            raise ChaosError("the probing process has died") from None


def _run(probes: Probes, stop: Event, connection: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Whoever started this process ends it.
    seen: list[Observation] = []
    connection.send(None)
    asyncio.run(_send(probes, stop, seen))
    connection.send(seen)


async def _send(probes: Probes, stop: Event, seen: list[Observation]) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=probes.base_url, timeout=_TIMEOUT_S, limits=limits, trust_env=False
    ) as client:
        rngs = (random.Random(probes.seed + number) for number in range(probes.streams))
        endless = [_streams(client, probes.known, rng, seen) for rng in rngs]
        if probes.asks_routes:
            paths = {"ping": "/ping", "health": "/health"}
            endless += [_probe(client, kind, path, seen) for kind, path in paths.items()]
        tasks = [asyncio.create_task(each) for each in endless]
        if probes.arrivals_per_s:
            await _arrivals(client, probes, stop, seen)
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


async def _streams(
    client: httpx.AsyncClient,
    known: Sequence[KnownAnswer],
    rng: random.Random,
    seen: list[Observation],
) -> None:
    while True:
        await _stream(client, rng.choice(known), seen, _TIMEOUT_S)
        if seen[-1].status != 200:
            await asyncio.sleep(_RETRY_S)


async def _arrivals(
    client: httpx.AsyncClient, probes: Probes, stop: Event, seen: list[Observation]
) -> None:
    rng = random.Random(probes.seed)
    async with asyncio.TaskGroup() as tasks:
        while not stop.is_set():
            stream = _stream(client, rng.choice(probes.known), seen, _ARRIVAL_TIMEOUT_S)
            tasks.create_task(stream)
            await asyncio.sleep(rng.expovariate(probes.arrivals_per_s))


async def _stream(
    client: httpx.AsyncClient, answer: KnownAnswer, seen: list[Observation], timeout_s: float
) -> None:
    """Ask for an answer; note the gaps between its parts, and what became of it last."""
    start_s = last_s = time.monotonic()
    text, status, detail, is_whole, reason = "", 0, "", False, None
    body = answer.body(stream=True)
    try:
        async with client.stream("POST", answer.path, json=body, timeout=timeout_s) as response:
            status = response.status_code
            if status != 200:
                detail = (await response.aread()).decode(errors="replace")[:300]
                response.raise_for_status()
            async for event in EventSource(response).aiter_sse():
                if event.data == "[DONE]":
                    is_whole = True
                else:
                    now_s = time.monotonic()
                    if text:
                        seen.append(Observation("gap", last_s, now_s, status))
                    last_s = now_s
                    choices = orjson.loads(event.data).get("choices") or [{}]
                    text += answered_text(choices[0])
                    reason = choices[0].get("finish_reason") or reason
    except httpx.HTTPError as error:
        detail = detail or repr(error)
    # A stream whose engine was killed may come through a router with an end, but without a reason.
    if status == 200 and (not is_whole or reason in (None, "abort")):
        status, detail = 0, detail or "the stream ended early"
    is_different = status == 200 and text != answer.text
    end_s = time.monotonic()
    seen.append(Observation("stream", start_s, end_s, status, is_different, detail))
