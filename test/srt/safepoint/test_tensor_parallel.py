"""Two ranks suspend together: same layers, same outputs, no rank waits for ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from srt.own_engine import is_flushed, own_engine, params, state

TIMEOUT_S = 120
NUM_OFFLINE, NUM_ONLINE = 24, 24
RESUMED, MOST_ROUNDS = 5, 20

ARRIVALS_S = 3.0
"""As long as the offline requests run: those who come at once suspend a step once together."""


@pytest.fixture(scope="module")
def engine(small_model: Path) -> Iterator[Any]:
    coserve = {
        # Without online requests it fills steps as far as that pays.
        "offline_policy": "conserve",
        "slo_ttft_ms": 1,
        "safepoint_interval": 1,
        "startup_profile_seconds": 2.0,
    }
    with own_engine(
        small_model, coserve, tp_size=2, max_total_tokens=8192, chunked_prefill_size=1024
    ) as running:
        yield running


def resumed(engine: Any) -> int:
    """Suspended steps that went on so far."""
    safepoints = state(engine)["safepoints"]
    assert safepoints["enabled"], safepoints
    return int(safepoints["resumed"])


def test_ranks_stay_in_step_while_steps_are_suspended(engine: Any) -> None:
    """When an arrival meets a long pass is up to the machine: it is tried until some do."""
    rng = random.Random(1)
    requests = [
        (
            rng.choices(range(10, 700), k=900 if offline else 30),
            4 if offline else 12,
            offline,
        )
        for offline in [True] * NUM_OFFLINE + [False] * NUM_ONLINE
    ]

    async def one(i: int, *, as_online: bool) -> Any:
        ids, n, offline = requests[i]
        if not (offline or as_online):
            await asyncio.sleep(rng.uniform(0.02, ARRIVALS_S))
        output = await engine.async_generate(
            input_ids=ids, sampling_params=params(n, offline=offline and not as_online)
        )
        return output["output_ids"]

    async def all_of_them(*, as_online: bool) -> list[Any]:
        work = asyncio.gather(*(one(i, as_online=as_online) for i in range(len(requests))))
        return await asyncio.wait_for(work, TIMEOUT_S)

    # Steps of online requests are never suspended.
    expected = engine.loop.run_until_complete(all_of_them(as_online=True))
    assert resumed(engine) == 0
    for _ in range(MOST_ROUNDS):
        assert is_flushed(engine)
        assert engine.loop.run_until_complete(all_of_them(as_online=False)) == expected
        if resumed(engine) >= RESUMED:
            break
    assert resumed(engine) >= RESUMED
    assert is_flushed(engine)
