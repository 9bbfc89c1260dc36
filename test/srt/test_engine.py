"""The in-process Engine, on two tensor-parallel ranks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from srt.own_engine import is_flushed, own_engine, params, state


@pytest.fixture(scope="module")
def engine(small_model: Path) -> Iterator[Any]:
    coserve = {
        "offline_policy": "coserve",
        "slo_ttft_ms": 300,
        "slo_tpot_ms": 50,
        "startup_profile_seconds": 1.0,
        "kv_checkpoint": "eager",
    }
    with own_engine(
        small_model,
        coserve,
        tp_size=2,
        max_total_tokens=1024,
        chunked_prefill_size=128,
        schedule_conservativeness=0.1,
    ) as running:
        yield running


def test_ranks_stay_in_step_while_offline_requests_give_way(engine: Any) -> None:
    """A rank that decided differently would hang or crash both."""
    rng = random.Random(1)
    requests = [
        (rng.choices(range(10, 700), k=rng.choice([20, 150, 400])), rng.randrange(5, 40), i % 3 > 0)
        for i in range(24)
    ]
    together_online = engine.generate(
        input_ids=[ids for ids, _, _ in requests],
        sampling_params=[params(n, offline=False) for _, n, _ in requests],
    )
    expected = [output["output_ids"] for output in together_online]

    async def one(i: int) -> Any:
        ids, n, offline = requests[i]
        if not offline:
            await asyncio.sleep(0.02 * i)
        return await engine.async_generate(
            input_ids=ids, sampling_params=params(n, offline=offline)
        )

    async def together() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*map(one, range(len(requests)))), 180)

    outputs = engine.loop.run_until_complete(together())
    assert [output["output_ids"] for output in outputs] == expected
    counts = state(engine)["offline"]
    assert counts["received"] == 16
    assert counts["retracted"] + counts["parked"] + counts["paused"] > 0
    assert (counts["waiting"], counts["running"], counts["prefilling"]) == (0, 0, 0)
    checkpoints = state(engine)["kv_checkpoint"]
    assert checkpoints["mode"] == "eager"
    assert checkpoints["checkpointed_tokens"] > 0


def test_the_state_shows_the_settings(engine: Any) -> None:
    assert state(engine)["config"]["slo_ttft_ms"] == 300


def test_an_unknown_class_is_a_value_error(engine: Any) -> None:
    with pytest.raises(ValueError, match="'online' or 'offline'"):
        engine.generate("x", {"custom_params": {"coserve_class": "batch"}})


def test_the_cache_can_be_flushed_when_all_is_done(engine: Any) -> None:
    assert is_flushed(engine)
