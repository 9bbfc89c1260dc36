"""Parts of the line engine: the source, the turns, and what is expected of lines."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from batch.scripted_backend import ENDPOINT, ScriptedBackend
from sglang_coserve.errors import StorageError
from sglang_coserve.jsonl.request_line import output_limit
from sglang_coserve.lines.backend import LineRequest, TokenRate
from sglang_coserve.lines.background import Clock, WorkerThreads
from sglang_coserve.lines.engine_lines import TURN_S, EngineLines, LineTurns
from sglang_coserve.lines.journal import LineTokens
from sglang_coserve.lines.line_run import OutputLengths
from sglang_coserve.lines.line_source import LineSource
from sglang_coserve.lines.serve_line import AttemptContext, EngineHealth, RetryPolicy, serve_line
from waiting import until


async def test_a_source_reads_only_a_little_ahead(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x" * 99 + b"\n" + b"y" * 3_000_000 + b"\n" + (b"z" * 99 + b"\n") * 50_000)
    threads = WorkerThreads("test", 1)
    source = LineSource(path, 4_000_000, lambda _: True, threads)
    numbers = []
    async for line in source:
        numbers.append(line.number)
        assert len(source._ahead) <= 256
        assert sum(len(ahead.content) for ahead in source._ahead) <= 3_000_100
    assert numbers == list(range(1, 50_003))
    path.unlink()
    with pytest.raises(StorageError, match="No such file"):
        await anext(LineSource(path, 100, lambda _: True, threads))
    await threads.close()


class Engine:
    """Lines that take some time, under a clock that passes as they are served."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns = LineTurns(lambda: self.now_s)
        self.beside: set[str] = set()
        self.alone: set[str] = set()
        self.order: list[str] = []

    async def serve(self, name: str, steps: int = 3) -> None:
        is_suspect = name.startswith("s")
        kind = self.alone if is_suspect else self.beside
        async with self.turns.one(is_suspect=is_suspect):
            self.order.append(name)
            kind.add(name)
            try:
                for _ in range(steps):
                    assert len(self.alone) <= 1
                    assert not (self.alone and self.beside)
                    await asyncio.sleep(0)
                    self.now_s += 1.0
            finally:
                kind.discard(name)

    async def batch(self, *suspects: str) -> None:
        with self.turns.suspects():
            for name in suspects:
                await self.serve(name)
                await asyncio.sleep(0)


async def test_suspects_go_first_and_then_both_take_turns() -> None:
    engine = Engine()
    suspects = [f"s{n}" for n in range(45)]
    batches = [engine.batch(*suspects[:15]), engine.batch(*suspects[15:])]

    async def ordinary(number: int) -> None:
        for n in range(30):
            await engine.serve(f"o{number}-{n}")

    # The suspects begin while ordinary lines are being served.
    others = [asyncio.create_task(ordinary(n)) for n in range(3)]
    await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(*batches, *others), 30)
    assert sorted(suspects) == sorted(n for n in engine.order if n.startswith("s"))
    order = engine.order
    kinds = "".join(name[0] for name in order)
    assert kinds.count("o") == 90
    stretches = [len(part) for part in kinds.replace("os", "o s").split()]
    assert len(stretches) > 2, "one kind waited for the whole of the other"
    # A suspect takes 3 s of a turn of 60.
    assert max(len(part) for part in kinds.split("o")) <= TURN_S / 3 + 1


@pytest.mark.parametrize("seed", range(5))
async def test_whoever_is_cancelled_holds_up_nobody(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine()
    tasks = [
        asyncio.create_task(
            engine.batch(*(f"s{n}-{m}" for m in range(4)))
            if rng.random() < 0.3
            else engine.serve(f"o{n}", rng.randint(1, 40))
        )
        for n in range(60)
    ]
    for _ in range(40):
        await asyncio.sleep(0)
        rng.choice(tasks).cancel()
    ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert {type(end) for end in ends} == {type(None), asyncio.CancelledError}
    await asyncio.wait_for(engine.serve("o-last"), 5)
    await asyncio.wait_for(engine.batch("s-last"), 5)


def test_lines_with_a_like_limit_are_alike_and_others_as_the_mean_of_all() -> None:
    lengths = OutputLengths()
    lengths.add(-1, 10)
    assert lengths.expected(-1) == 0
    assert lengths.expected(output_limit({"max_tokens": "many"})) == 10
    lengths = OutputLengths()
    for _ in range(50):
        lengths.add(100, 10)
        lengths.add(1000, 400)
    assert lengths.expected(120) == round((500 + 205) / 51)
    assert lengths.expected(1000) == round((20_000 + 205) / 51)
    assert (lengths.expected(None), lengths.expected(5)) == (205, 5)


def test_the_rate_is_that_of_the_time_with_work() -> None:
    now_s = 100.0
    rate = TokenRate(lambda: now_s, window_s=10)
    assert rate.per_s() is None
    with rate.in_flight():
        now_s += 1
        rate.add(50)
        now_s += 1
        assert rate.per_s() == 25
    now_s += 1000  # Idle.
    assert rate.per_s() == 25
    with rate.in_flight(), rate.in_flight():
        now_s += 8
        assert rate.per_s() == 5
        rate.add(100)
        now_s += 2
        assert rate.per_s() == 10  # The first 50 are out of the window.
        now_s += 8
        assert rate.per_s() is None


def test_what_is_expected_stands_in_for_what_is_missing_of_ten_seconds() -> None:
    now_s = 0.0
    rate = TokenRate(lambda: now_s, window_s=20, expected_per_s=60)
    assert rate.per_s() == 60
    now_s += 1000  # Idle.
    assert rate.per_s() == 60
    with rate.in_flight():
        now_s += 2
        assert rate.per_s() == 48  # Nothing came in two seconds of ten.
        rate.add(50)
        assert rate.per_s() == 53
        now_s += 8
        assert rate.per_s() == 5
        now_s += 100
        assert rate.per_s() == pytest.approx(60 / 21)


async def test_tokens_of_another_model_are_not_gone_on_from() -> None:
    backend, received = ScriptedBackend(holds=True, model="b"), LineTokens("a")
    engine_lines = EngineLines()
    context = AttemptContext(
        backend=backend,
        engine_lines=engine_lines,
        clock=Clock(),
        rng=random.Random(0),
        retry_policy=RetryPolicy(),
        health=EngineHealth(),
    )
    request = LineRequest("batch_1", 1, ENDPOINT, {"prompt": "x"})

    async def fresh_body() -> dict[str, Any]:
        return dict(request.body)

    serving = asyncio.create_task(serve_line(request, fresh_body, received, context))
    await until(lambda: backend.in_flight)
    of_b = backend.in_flight[0]
    backend.model = "a"  # Most engines have the first model again.
    engine_lines.take_out()
    of_b.generate(2)  # On the way when the attempt is cancelled.
    await until(lambda: len(backend.started) == 2 and backend.in_flight)
    assert backend.started[1].generated == ()
    backend.finish_all()
    assert (await serving)[1] == "a"
