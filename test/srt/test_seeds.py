"""A seed chooses the tokens, whatever runs beside a request and however often it is retracted."""

from __future__ import annotations

import random
from typing import Any

from srt.scripted_engine import EngineProcess, ScriptedEngine

OUTPUT_TOKENS = 60
FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.01})
SEEDED = {f"seeded-{number}": number % 4 for number in range(12)}
"""Requests with their seeds."""


def seeded(engine: ScriptedEngine, rid: str) -> Any:
    number = int(rid.rpartition("-")[2])
    prompt = random.Random(number // 4).choices(range(10, 700), k=90)
    return engine.request(
        rid,
        prompt,
        OUTPUT_TOKENS,
        offline=True,
        temperature=1.0,
        sampling_seed=SEEDED[rid],
        **FILTERS[number % 3],
    )


def run_alone(engine: ScriptedEngine) -> dict[str, list[int]]:
    for rid in SEEDED:
        engine.run([seeded(engine, rid)])
    return {rid: engine.output(rid) for rid in SEEDED}


def run_beside_others(engine: ScriptedEngine) -> tuple[dict[str, list[int]], int]:
    """With more than fits the memory, some of it online, greedy, or sampled without a seed."""
    engine.scheduler.flush_cache()
    before = engine.scheduler.parts.events["retracted"]
    messages = {0: [seeded(engine, rid) for rid in SEEDED]}
    for step in [step for step in range(1, 61) if step % 4 < 2]:
        prompt = random.Random(step).choices(range(10, 700), k=100)
        sampling = {"temperature": float(step % 2)}
        messages[step] = [engine.request(f"other-{step}", prompt, 20, **sampling)]
    engine.run(messages)
    retracted = engine.scheduler.parts.events["retracted"] - before
    return {rid: engine.output(rid) for rid in SEEDED}, retracted


def test_seeds_choose_the_tokens(engine: EngineProcess) -> None:
    alone = engine.call(run_alone)
    beside, retracted = engine.call(run_beside_others)
    assert retracted > 0
    assert beside == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == len(SEEDED)


def sampled_without_seeds(engine: ScriptedEngine) -> list[list[int]]:
    for number in range(2):
        engine.run([engine.request(f"free-{number}", [5, 6, 7], 30, temperature=1.0)])
    return [engine.output(f"free-{number}") for number in range(2)]


def test_requests_without_a_seed_are_drawn_anew(engine: EngineProcess) -> None:
    first, again = engine.call(sampled_without_seeds)
    assert first != again
