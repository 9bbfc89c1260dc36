"""Suspects are alone in the engine, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import random

import pytest

from sglang_coserve.lines.engine_lines import LineTurns

TURN_S = 60.0


class Engine:
    """Lines that take some time, under a clock that passes as they are served."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns = LineTurns(lambda: self.now_s, TURN_S)
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


async def test_ordinary_lines_do_not_wait_for_each_other() -> None:
    engine = Engine()
    tasks = [asyncio.create_task(engine.serve(f"o{n}")) for n in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(engine.beside) == 5
    await asyncio.gather(*tasks)


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
