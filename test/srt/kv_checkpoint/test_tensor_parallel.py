"""Two ranks with checkpoints: copies end in the same step on both, or both would hang."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_coserve.srt.marks.offline_marks import offline_marks, sent_with
from sglang_coserve.srt.monitoring.scheduler_query import LEAVE, ask, moved_tokens
from srt.own_engine import IDLE_TIMEOUT_S, is_flushed, own_engine, params, state

TIMEOUT_S = 120
MOST_ROUNDS = 10


@pytest.fixture(scope="module")
def move_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moved") / "kv"


@pytest.fixture(scope="module")
def engine(small_model: Path, move_dir: Path) -> Iterator[Any]:
    coserve = {
        "offline_policy": "coserve",
        "slo_ttft_ms": 300,
        "slo_tpot_ms": 50,
        "startup_profile_seconds": 0.0,
        "kv_checkpoint": "eager",
        "kv_move_dir": str(move_dir),
    }
    with own_engine(
        small_model,
        coserve,
        {"SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"},
        tp_size=2,
        page_size=16,
        max_total_tokens=768,
        chunked_prefill_size=128,
        schedule_conservativeness=0.1,
    ) as running:
        yield running


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
        stats = state(engine)["kv_checkpoint"]
        if stats["demoted_tokens"] and stats["prefetch_published_tokens"]:
            break
    assert stats["mode"] == "eager"
    assert state(engine)["config"]["slo_ttft_ms"] == 300
    assert stats["demoted_tokens"] > 0
    assert stats["prefetch_published_tokens"] > 0


def test_each_rank_leaves_its_part_and_without_one_of_them_all_is_computed_again(
    engine: Any, move_dir: Path
) -> None:
    prompt, rid, num_tokens = random.Random(3).choices(range(10, 700), k=100), "a" * 32, 60
    manager = engine.tokenizer_manager

    async def generate(**left: Any) -> dict[str, Any]:
        marks = offline_marks(due_in_s=None, job="batch", **left)
        with sent_with(marks):
            return await engine.async_generate(
                input_ids=prompt, sampling_params=params(num_tokens, offline=True), rid=rid
            )

    async def status() -> dict[str, Any]:
        (internal,) = await manager.get_internal_state()
        return internal["coserve"]

    async def computed_tokens() -> int:
        return int((await status())["recompute"]["offline"]["computed_tokens"])

    async def scenario() -> None:
        expected = (await generate())["output_ids"]
        for has_all in (True, False):
            enough = await computed_tokens() + 20
            running = asyncio.create_task(generate())
            while await computed_tokens() < enough:
                await asyncio.sleep(0.01)
            assert await ask(manager, LEAVE, [rid], "model") == [[rid]]
            output = await running
            tokens = moved_tokens(output["meta_info"]["finish_reason"]["message"])
            assert tokens, output
            paths = sorted(move_dir.iterdir())
            names = [f"{rid}-{rank}.kv.safetensors" for rank in range(2)]
            assert [path.name for path in paths] == names
            if not has_all:
                paths[1].unlink()
            before = (await status())["kv_moves"]["moved_in_tokens"]
            assert (await manager.flush_cache(timeout_s=IDLE_TIMEOUT_S)).success
            again = await generate(generated=output["output_ids"], moved_kv=(rid, tokens, "model"))
            assert again["output_ids"] == expected
            after = (await status())["kv_moves"]["moved_in_tokens"]
            assert after - before == has_all * tokens
            assert not list(move_dir.iterdir())

    engine.loop.run_until_complete(asyncio.wait_for(scenario(), TIMEOUT_S))
