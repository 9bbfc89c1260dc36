"""A drain of a real server whose lines go on with their KV, after that server has forgotten it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from http_lines.heard import Heard
from sglang_coserve.http_lines.http_engine import HttpEngine
from sglang_coserve.lines.backend import LineMovedError, LineRequest, LineResult, MovedKv
from sglang_coserve.lines.result_record import usage_of
from srt.batch_server.deployment import ADMIN_KEY, COMPLETIONS, Deployment
from waiting import GIVE_UP_S, until

NUM_LINES, NUM_TOKENS, TOKENS_BEFORE, PAGE = 6, 300, 20, 16
PROMPT = " ".join(f"the {n}th boat on the river" for n in range(8))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv") / "moved"


@pytest.fixture(scope="module")
def server(
    small_model: Path, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with Deployment(
        small_model,
        tmp_path_factory.mktemp("server"),
        *("--startup-profile-seconds", "0", "--page-size", str(PAGE), "--enable-cache-report"),
        *("--max-total-tokens", "8192", "--kv-checkpoint", "eager"),
        *("--kv-move-dir", str(directory)),
    ) as deployment:
        yield deployment


def request(
    number: int, generated: Sequence[int] = (), kv: MovedKv | None = None, **extra: Any
) -> LineRequest:
    body: dict[str, Any] = {"model": "small", "temperature": 0, "ignore_eos": True}
    body |= {"prompt": f"{number} {PROMPT}", "max_tokens": NUM_TOKENS, **extra}
    return LineRequest("batch_1", number, COMPLETIONS, body, tuple(generated), kv=kv)


async def drained(
    server: Deployment, connection: HttpEngine, requests: Sequence[LineRequest]
) -> tuple[list[list[int]], list[LineMovedError]]:
    """Drain the server amid some lines and let it forget all KV; return what came back."""
    model = (await connection.report()).model
    heard: list[list[int]] = [[] for _ in requests]
    attempts = [
        asyncio.ensure_future(connection.run(each, model, Heard(tokens.extend)))
        for each, tokens in zip(requests, heard, strict=True)
    ]
    await until(lambda: min(map(len, heard)) >= TOKENS_BEFORE)
    await asyncio.to_thread(server.ask, "POST", f"/coserve/drain?wait_s={GIVE_UP_S}")
    moved = await asyncio.gather(*attempts, return_exceptions=True)
    await asyncio.to_thread(server.ask, "DELETE", "/coserve/drain")
    await asyncio.to_thread(server.flush)
    assert all(isinstance(error, LineMovedError) for error in moved), moved
    return heard, [error for error in moved if isinstance(error, LineMovedError)]


def computed(result: LineResult, generated: Sequence[int]) -> int:
    usage = usage_of(result.body)
    return usage.input_tokens - usage.cached_tokens + len(generated)


async def test_lines_go_on_after_a_page_at_most_and_end_as_without_a_drain(
    server: Deployment, directory: Path
) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        numbers = range(NUM_LINES)
        async with HttpEngine(server.base_url, ADMIN_KEY) as connection:
            with server.slowly():
                heard, moved = await drained(server, connection, [request(n) for n in numbers])
            assert len({error.kv.name for error in moved if error.kv}) == NUM_LINES
            assert len(list(directory.iterdir())) == NUM_LINES
            model = (await connection.report()).model
            results = await asyncio.gather(
                *(
                    connection.run(request(n, heard[n], moved[n].kv), model, Heard())
                    for n in numbers
                )
            )
            whole = await asyncio.gather(
                *(connection.run(request(n), model, Heard()) for n in numbers)
            )
        assert [r.body["choices"] for r in results] == [r.body["choices"] for r in whole]
        again = [computed(result, heard[n]) for n, result in enumerate(results)]
        assert max(again) <= PAGE
        assert min(len(tokens) for tokens in heard) >= TOKENS_BEFORE
        assert not list(directory.iterdir())


async def test_a_line_that_starts_over_leaves_nothing(server: Deployment, directory: Path) -> None:
    """Its penalties are more than its tokens, so none are reported."""
    async with asyncio.timeout(GIVE_UP_S):
        async with HttpEngine(server.base_url, ADMIN_KEY) as connection:
            penalised = request(7, frequency_penalty=0.5, max_tokens=400)
            model = (await connection.report()).model
            with server.slowly():
                attempt = asyncio.ensure_future(connection.run(penalised, model, Heard()))
                heard, moved = await drained(server, connection, [request(8, max_tokens=400)])
            with pytest.raises(LineMovedError) as error:
                await attempt
            assert error.value.kv is None
            # A name that leads elsewhere is none.
            kv = MovedKv(f"../{moved[0].kv.name}", moved[0].kv.tokens)
            again = request(8, heard[0], kv, max_tokens=400)
            result = await connection.run(again, model, Heard())
            assert result.is_ok
            (left,) = directory.iterdir()
            left.unlink()


@pytest.mark.parametrize("path", ["/etc/passwd", "open"])
def test_a_directory_that_others_can_read_stops_the_start(
    small_model: Path, tmp_path: Path, path: str
) -> None:
    from sglang_coserve.errors import StartupError
    from sglang_coserve.srt.kv_moves.kv_directory import KvDirectory

    place = tmp_path / path
    if path == "open":
        place.mkdir(mode=0o755)
    with pytest.raises(StartupError, match="--kv-move-dir"):
        KvDirectory.check(place)
