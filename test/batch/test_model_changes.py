"""Weights that are exchanged again while lines begin again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from batch.scenarios import ENDPOINT, opened
from batch.scripted_backend import ScriptedBackend
from sglang_coserve.lines.backend import LineBackend, LineRequest, LineResult
from sglang_coserve.lines.clock import Clock
from sglang_coserve.lines.engine_lines import EngineLines
from sglang_coserve.lines.journal import LineTokens
from sglang_coserve.lines.retry import EngineHealth, RetryPolicy
from sglang_coserve.lines.serve_line import AttemptContext, serve_line
from sglang_coserve.srt.tokenizer.updating_manager import WeightUpdates
from waiting import GIVE_UP_S, until


class Engine(LineBackend):
    """Answers when it may, with the weights that it has then."""

    def __init__(self) -> None:
        self.weights = WeightUpdates()
        self.may_answer = asyncio.Event()
        self.num_running = 0

    @property
    def model(self) -> str:
        return f"model {self.weights.name}"

    @property
    def is_changing(self) -> bool:
        return self.weights.is_changing

    async def settled(self) -> None:
        await self.weights.settled()

    async def run(
        self, request: LineRequest, on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        self.num_running += 1
        try:
            await self.may_answer.wait()
            return LineResult(200, "", {"model": self.model})
        finally:
            self.num_running -= 1


class Lines:
    """Lines that an engine has, whose bodies are read again only when that is allowed."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.may_read = asyncio.Event()
        self.num_reading = 0
        engine_lines = EngineLines()
        engine.weights.listeners.add(engine_lines.take_out)
        context = AttemptContext(
            backend=engine,
            engine_lines=engine_lines,
            clock=Clock(),
            rng=random.Random(0),
            retry_policy=RetryPolicy(),
            health=EngineHealth(),
        )
        self.tasks = [
            asyncio.create_task(
                serve_line(
                    LineRequest("batch_1", number, ENDPOINT, {}, (), 1e12),
                    self._fresh_body,
                    LineTokens(engine.model),
                    context,
                )
            )
            for number in range(count)
        ]

    async def _fresh_body(self) -> dict[str, Any]:
        self.num_reading += 1
        try:
            await self.may_read.wait()
            return {}
        finally:
            self.num_reading -= 1


async def test_weights_that_are_exchanged_many_times_in_a_row_stop_no_line() -> None:
    engine = Engine()
    lines = Lines(engine, 5)
    await until(lambda: engine.num_running == 5)
    for _ in range(4):
        with engine.weights.updating(empties_cache=True):
            await until(lambda: not engine.num_running and not lines.num_reading)
        assert not engine.is_changing
        # None has its body yet when the next exchange begins.
        await until(lambda: lines.num_reading == 5)
    lines.may_read.set()
    await until(lambda: engine.num_running == 5)
    engine.may_answer.set()
    async with asyncio.timeout(GIVE_UP_S):
        served = await asyncio.gather(*lines.tasks)
    assert {model for _, model in served} == {engine.model}
    assert all(result.body == {"model": engine.model} for result, _ in served)


async def test_what_fails_when_weights_are_exchanged_keeps_neither_them_nor_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights, told = WeightUpdates(), []

    def fail() -> None:
        raise RuntimeError("out of luck")

    weights.listeners.add(fail)
    weights.listeners.add(lambda: told.append(True))
    with weights.updating(empties_cache=True):
        assert told == [True]
    assert not weights.is_changing
    assert "out of luck" in caplog.text


async def test_who_listens_no_more_is_not_kept(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    for _ in range(3):
        scene = await opened(tmp_path, backend)
        async with scene.service:
            assert len(backend.listeners) == 1
    assert len(backend.listeners) == 0
