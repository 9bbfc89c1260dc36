"""Online requests and probes, which note how long each took.

From a process of its own, since one that also sends large bodies would take its own pauses for the
server's.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx2
import orjson

from chaos_bench.answers import KnownAnswer, answered_text
from chaos_bench.figures import Observation
from chaos_bench.thread_times import ThreadTimes

_PROBE_EVERY_S: Final = 0.02
_PROBE_TIMEOUT_S: Final = 20.0
_RETRY_S: Final = 0.1
_PRIORITY: Final = -20
_LATE_S: Final = 0.25
"""Time after which a ping is worth a look at what the server does."""


@dataclass(frozen=True, slots=True)
class Probes:
    """What is sent until the file ``end`` is there."""

    base_url: str
    known: Sequence[KnownAnswer]
    seed: int
    end: Path
    pid_file: Path
    """Has the id of the server's process."""

    streams: int
    """Online streams at a time, each of which follows another."""

    stream_timeout_s: float
    asks_routes: bool
    """Routes without work, and of one token, are asked all the time."""

    stacks: Path | None = None
    """Gets the stacks of the server's process while a ping is late. None to write none."""


def probe(probes: Probes) -> list[Observation]:
    """Send requests until the end; return an observation of each.

    The process goes before all others where it may, as a client has a machine of its own.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    seen: list[Observation] = []
    asyncio.run(_send(probes, seen))
    return seen


async def _send(probes: Probes, seen: list[Observation]) -> None:
    limits = httpx2.Limits(max_connections=None)
    async with (
        httpx2.AsyncClient(base_url=probes.base_url, limits=limits, trust_env=False) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(probes.streams):
            tasks.create_task(_streams(client, probes, random.Random(probes.seed + number), seen))
        if probes.asks_routes:
            for kind, path in (("ping", "/ping"), ("health", "/health")):
                tasks.create_task(_ask(client, probes, kind, path, seen))


async def _ask(
    client: httpx2.AsyncClient, probes: Probes, kind: str, path: str, seen: list[Observation]
) -> None:
    while not probes.end.exists():
        pids = (int(probes.pid_file.read_text()), os.getpid())
        before = [ThreadTimes.of_process(pid) for pid in pids]
        start_s = time.monotonic()
        stacks = probes.stacks if kind == "ping" else None
        async with _stacks_if_late(stacks, pids[0]):
            try:
                status = (await client.get(path, timeout=_PROBE_TIMEOUT_S)).status_code
            except httpx2.HTTPError:
                status = 0
        end_s = time.monotonic()
        server, own = (
            ThreadTimes.of_process(pid) - earlier for pid, earlier in zip(pids, before, strict=True)
        )
        wait_ms = server.waited_ms + own.waited_ms
        detail = (
            f"the server's event loop ran for {server.ran_ms:.0f} ms and waited "
            f"{server.waited_ms:.0f} ms for a CPU, the sender's waited {own.waited_ms:.0f} ms"
        )
        seen.append(Observation(kind, start_s, end_s, status, detail=detail, cpu_wait_ms=wait_ms))
        await asyncio.sleep(_RETRY_S if status == 0 else _PROBE_EVERY_S)


@asynccontextmanager
async def _stacks_if_late(path: Path | None, pid: int) -> AsyncGenerator[None]:
    """Append the stacks of a process to a file, if there is a file and the body takes long."""
    if path is None:
        yield
        return
    writing = asyncio.create_task(_write_stacks(path, pid))
    try:
        yield
    finally:
        writing.cancel()


async def _write_stacks(path: Path, pid: int) -> None:
    await asyncio.sleep(_LATE_S)
    command = ("py-spy", "dump", "--nonblocking", "--pid", str(pid))
    with path.open("ab") as file:
        file.write(f"--- after {_LATE_S:g} s, at {time.monotonic():.3f} s\n".encode())
        file.flush()
        dumping = await asyncio.create_subprocess_exec(
            *command, stdout=file, stderr=asyncio.subprocess.STDOUT
        )
        await dumping.wait()


async def _streams(
    client: httpx2.AsyncClient, probes: Probes, rng: random.Random, seen: list[Observation]
) -> None:
    while not probes.end.exists():
        answered = await _stream(client, rng.choice(probes.known), probes.stream_timeout_s, seen)
        seen.append(answered)
        if answered.status != 200:
            await asyncio.sleep(_RETRY_S)


async def _stream(
    client: httpx2.AsyncClient, answer: KnownAnswer, timeout_s: float, seen: list[Observation]
) -> Observation:
    """Ask for an answer; note the gaps between its parts, and return what became of it."""
    start_s = last_s = time.monotonic()
    text, status, detail, is_whole, reason = "", 0, "", False, None
    body = answer.body(stream=True)
    try:
        async with client.stream("POST", answer.path, json=body, timeout=timeout_s) as response:
            status = response.status_code
            if status != 200:
                detail = (await response.aread()).decode(errors="replace")[:300]
                response.raise_for_status()
            async for event in httpx2.EventSource(response):
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
    except httpx2.HTTPError as error:
        detail = detail or repr(error)
    # A stream whose engine was killed may come through a router with an end, but without a reason.
    if status == 200 and (not is_whole or reason in (None, "abort")):
        status, detail = 0, detail or "the stream ended early"
    is_different = status == 200 and text != answer.text
    return Observation("stream", start_s, time.monotonic(), status, is_different, detail)
