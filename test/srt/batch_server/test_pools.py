"""Lines on a relaxed and a strict real server: pulled with their KV, given back, and never lost.

They are sampled with a seed, and end as undisturbed ones do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from http_lines.heard import Heard
from sglang_coserve.fleet.backend import FleetBackend
from sglang_coserve.http_lines.http_engine import AttemptListener, HttpEngine
from sglang_coserve.lines.backend import LineRequest, LineResult
from sglang_coserve.lines.result_record import usage_of
from srt.batch_server.deployment import ADMIN_KEY, API_KEY, COMPLETIONS, Deployment
from waiting import GIVE_UP_S, until

NUM_LINES, NUM_TOKENS, PAGE = 6, 500, 16
KV_TOKENS = 4096
PROMPT = " ".join(f"the {n}th boat on the river" for n in range(8))
TPOT_MS = 5000
"""Met by any machine, so that KV memory decides what the strict server wants."""


@dataclass
class Two:
    """The two servers."""

    relaxed: Deployment
    strict: Deployment


@pytest.fixture(scope="module")
def servers(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    directory = tmp_path_factory.mktemp("kv") / "moved"
    with ExitStack() as stack:
        deployments = [
            Deployment(
                small_model,
                tmp_path_factory.mktemp(pool),
                *("--startup-profile-seconds", "0", "--page-size", str(PAGE)),
                *("--enable-cache-report", "--max-total-tokens", str(KV_TOKENS)),
                *("--kv-checkpoint", "eager", "--kv-move-dir", str(directory), "--pool", pool),
                *("--slo-tpot-ms", str(TPOT_MS), "--offline-policy", "ooco"),
            )
            for pool in ("relaxed", "strict")
        ]
        with ThreadPoolExecutor() as threads:
            starting = [threads.submit(each.start) for each in deployments]
        for each, started in zip(deployments, starting, strict=True):
            if started.exception() is None:
                stack.callback(each.stop)
        for started in starting:
            started.result()
        yield Two(*deployments)


def request(number: int) -> LineRequest:
    body: dict[str, Any] = {"model": "small", "temperature": 1.0, "seed": 7, "ignore_eos": True}
    body |= {"prompt": f"{number} {PROMPT}", "max_tokens": NUM_TOKENS}
    return LineRequest("batch_1", number, COMPLETIONS, body)


@dataclass
class Watched:
    """A fleet of both servers, whose attempts are recorded."""

    fleet: FleetBackend
    attempts: dict[int, list[tuple[str, LineRequest]]] = field(default_factory=dict)
    """Of each line, where it went and with what."""

    tokens: Counter[str] = field(default_factory=Counter)
    """How many came from each server."""

    def watch(self) -> None:
        for engine in self.fleet.engines:
            engine.http.run = self._recording(  # type: ignore[method-assign]
                engine.url, engine.http.run
            )

    def _recording(self, url: str, run: Callable[..., Any]) -> Callable[..., Any]:
        async def recorded(request: LineRequest, model: str, listener: AttemptListener) -> Any:
            self.attempts.setdefault(request.line, []).append((url, request))
            add_tokens = listener.add_tokens

            def counted(tokens: Sequence[int]) -> None:
                self.tokens[url] += len(tokens)
                add_tokens(tokens)

            listener.add_tokens = counted  # type: ignore[method-assign]
            return await run(request, model, listener)

        return recorded

    def has_pulled(self, server: Deployment, count: int) -> bool:
        """Whether a server has so many lines that began elsewhere."""
        found = [attempts[-1] for attempts in self.attempts.values()]
        there = [request for url, request in found if url == server.base_url and request.generated]
        return len(there) >= count

    def came_back(self, server: Deployment, line: int) -> bool:
        """Whether a server had a line again, after another one."""
        urls = [url for url, _ in self.attempts[line]]
        return urls.count(server.base_url) > 1 and len(set(urls)) > 1

    async def results(self, numbers: Sequence[int]) -> dict[int, LineResult]:
        found = await asyncio.gather(*(self.fleet.run(request(n), ignore) for n in numbers))
        return dict(zip(numbers, found, strict=True))


def ignore(_tokens: Sequence[int]) -> None:
    pass


async def undisturbed(server: Deployment, numbers: Sequence[int]) -> dict[int, Any]:
    """The answers of one server that serves all lines from their beginning to their end."""
    async with HttpEngine(server.base_url, ADMIN_KEY) as connection:
        model = (await connection.report()).model
        results = await asyncio.gather(
            *(connection.run(request(n), model, Heard()) for n in numbers)
        )
    return {n: result.body["choices"] for n, result in zip(numbers, results, strict=True)}


def computed_again(result: LineResult, attempt: LineRequest) -> int:
    """How many tokens the last attempt at a line computed of those that there were."""
    usage = usage_of(result.body)
    return usage.input_tokens - usage.cached_tokens + len(attempt.generated)


def run(servers: Two, scenario: Callable[[Watched], Any]) -> None:
    async def within() -> None:
        async with FleetBackend(ADMIN_KEY, look_interval_s=0.05) as fleet:
            fleet.engines.set_listed([servers.relaxed.base_url, servers.strict.base_url])
            await fleet.engines.ready()
            await until(lambda: {engine.pool for engine in fleet.engines} == {"relaxed", "strict"})
            watched = Watched(fleet)
            watched.watch()
            await scenario(watched)

    asyncio.run(asyncio.wait_for(within(), 2 * GIVE_UP_S))


def test_running_lines_go_on_in_the_strict_server_after_a_page_at_most(servers: Two) -> None:
    async def scenario(watched: Watched) -> None:
        numbers = range(NUM_LINES)
        texts = await undisturbed(servers.relaxed, numbers)
        await asyncio.to_thread(servers.relaxed.flush)
        results = await watched.results(numbers)
        assert {n: result.body["choices"] for n, result in results.items()} == texts
        assert watched.fleet.ends["pulled"] > 0
        ways = {n: [url for url, _ in attempts] for n, attempts in watched.attempts.items()}
        first = Counter(way[0] for way in ways.values())
        assert first == {servers.relaxed.base_url: NUM_LINES}
        pulled = [n for n in numbers if ways[n][-1] == servers.strict.base_url]
        assert pulled
        again = {n: computed_again(results[n], watched.attempts[n][-1][1]) for n in pulled}
        assert max(again.values()) <= PAGE, again
        assert all(watched.attempts[n][-1][1].generated for n in pulled)

    run(servers, scenario)


def test_lines_go_back_when_online_requests_need_the_memory(servers: Two) -> None:
    async def scenario(watched: Watched) -> None:
        numbers = range(NUM_LINES)
        texts = await undisturbed(servers.relaxed, numbers)
        serving = asyncio.ensure_future(watched.results(numbers))
        await until(lambda: watched.has_pulled(servers.strict, 4))
        async with httpx2.AsyncClient(base_url=servers.strict.base_url, timeout=GIVE_UP_S) as http:
            while not watched.fleet.ends["returned"] and not serving.done():
                await asyncio.gather(*(online(http, n) for n in range(8)))
        results = await serving
        assert watched.fleet.ends["returned"] > 0
        assert any(watched.came_back(servers.relaxed, n) for n in numbers)
        moved = [n for n in numbers if len(watched.attempts[n]) > 1]
        again = {n: computed_again(results[n], watched.attempts[n][-1][1]) for n in moved}
        assert max(again.values()) <= PAGE, again
        assert {n: result.body["choices"] for n, result in results.items()} == texts

    run(servers, scenario)


def test_the_end_of_the_strict_server_loses_nothing(servers: Two) -> None:
    async def scenario(watched: Watched) -> None:
        numbers = range(NUM_LINES)
        texts = await undisturbed(servers.relaxed, numbers)
        serving = asyncio.ensure_future(watched.results(numbers))
        # The first line that the strict server has, long before its end.
        await until(lambda: watched.tokens[servers.strict.base_url])
        assert not serving.done()
        servers.strict.kill()
        results = await serving
        assert watched.fleet.ends["lost"] > 0
        assert {n: result.body["choices"] for n, result in results.items()} == texts

    try:
        run(servers, scenario)
    finally:
        servers.strict.start()


async def online(http: httpx2.AsyncClient, number: int) -> None:
    """Serve an online request that takes an eighth of the KV memory."""
    prompt = [100 + (number + n) % 50 for n in range(KV_TOKENS // 8)]
    body = {"model": "small", "prompt": prompt, "max_tokens": KV_TOKENS // 32, "ignore_eos": True}
    headers = {"authorization": f"Bearer {API_KEY}"}
    (await http.post(COMPLETIONS, json=body, headers=headers)).raise_for_status()
