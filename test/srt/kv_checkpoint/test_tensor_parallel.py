"""Two ranks with checkpoints: copies end in the same step on both, or both would hang."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from srt.flushed import is_flushed

TIMEOUT_S = 120
MOST_ROUNDS = 10


@pytest.fixture(scope="module")
def engine(small_model: Path) -> Iterator[Any]:
    from sglang_coserve.config import CoserveConfig
    from sglang_coserve.srt.engine import CoserveEngine

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        environment.setenv("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")
        running = CoserveEngine(
            model_path=str(small_model),
            dtype="float32",
            tp_size=2,
            page_size=16,
            max_total_tokens=768,
            chunked_prefill_size=128,
            schedule_conservativeness=0.1,
            coserve_config=CoserveConfig(
                offline_policy="coserve",
                slo_ttft_ms=300,
                slo_tpot_ms=50,
                startup_profile_seconds=0.0,
                kv_checkpoint="eager",
            ),
        )
    yield running
    running.shutdown()


def params(max_new_tokens: int, *, offline: bool) -> dict[str, Any]:
    mark = {"custom_params": {"coserve_class": "offline"}} if offline else {}
    return {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True, **mark}


def test_ranks_stay_in_step_while_requests_give_way_and_resume(engine: Any) -> None:
    rng = random.Random(2)
    offline = [(rng.choices(range(10, 700), k=60), 100) for _ in range(5)]
    online = [(rng.choices(range(10, 700), k=350), 8) for _ in range(2)]

    async def generate(ids: list[int], n: int, *, is_offline: bool) -> list[int]:
        output = await engine.async_generate(
            input_ids=ids, sampling_params=params(n, offline=is_offline)
        )
        return list(output["output_ids"])

    async def together(*, with_offline: bool) -> list[list[int]]:
        tasks = [asyncio.create_task(generate(*spec, is_offline=with_offline)) for spec in offline]
        # Online requests come when the offline ones have most of the memory.
        await asyncio.sleep(0.5 * with_offline)
        tasks += [asyncio.create_task(generate(*spec, is_offline=False)) for spec in online]
        return await asyncio.wait_for(asyncio.gather(*tasks), TIMEOUT_S)

    expected = engine.loop.run_until_complete(together(with_offline=False))
    stats: dict[str, Any] = {"demoted_tokens": 0, "prefetch_published_tokens": 0}
    # When the online ones come is up to the machine: it is tried until requests give way.
    for _ in range(MOST_ROUNDS):
        assert is_flushed(engine)
        assert engine.loop.run_until_complete(together(with_offline=True)) == expected
        (internal,) = engine.loop.run_until_complete(engine.tokenizer_manager.get_internal_state())
        stats = internal["coserve"]["kv_checkpoint"]
        if stats["demoted_tokens"] and stats["prefetch_published_tokens"]:
            break
    assert stats["mode"] == "eager"
    assert stats["demoted_tokens"] > 0
    assert stats["prefetch_published_tokens"] > 0
