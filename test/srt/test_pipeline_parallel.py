"""Pipeline parallelism: two stages, two micro-batches, the same tokens, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from sglang_coserve.recording.calls import Updated, replay
from sglang_coserve.recording.file import read_recording
from srt.conftest import KV_POOL_TOKENS, Reference
from srt.own_engine import is_flushed, own_engine, params, state
from srt.scripted_engine import Spec

TIMEOUT_S = 120
MOST_ROUNDS = 5
TARGETS = {"slo_ttft_ms": 1000, "slo_tpot_ms": 0.01, "startup_profile_seconds": 1.0}
"""No step keeps them beside online requests: offline ones are set aside."""


def started(
    model: Path, recording: Path | None = None, **settings: Any
) -> AbstractContextManager[Any]:
    return own_engine(
        model,
        {"record_plans": None if recording is None else str(recording), **TARGETS},
        pp_size=2,
        max_total_tokens=KV_POOL_TOKENS,
        chunked_prefill_size=128,
        schedule_conservativeness=0.1,
        **settings,
    )


@pytest.fixture(scope="module")
def engine(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    recording = tmp_path_factory.mktemp("recording") / "plans.jsonl"
    with started(small_model, recording) as running:
        running.recording = recording
        yield running


def specs(seed: int) -> list[Spec]:
    """Offline requests that fill the pool, and online ones, some longer than a chunk."""
    rng = random.Random(seed)
    offline = [
        (f"off{i}", rng.choices(range(10, 700), k=rng.randint(20, 180)), 60, True)
        for i in range(16)
    ]
    online = [
        (f"on{i}", rng.choices(range(10, 700), k=rng.randint(20, 300)), 16, False)
        for i in range(10)
    ]
    return [*offline, *online]


async def generate(engine: Any, spec: Spec) -> Any:
    rid, ids, max_new_tokens, offline = spec
    sampling = {**params(max_new_tokens, offline=offline), "skip_special_tokens": False}
    return await engine.async_generate(input_ids=ids, sampling_params=sampling, rid=rid)


def serve(engine: Any, requests: Sequence[Spec]) -> dict[str, list[int]]:
    """Send the offline requests at once, the online ones while those run."""

    async def one(spec: Spec, delay_s: float) -> list[int]:
        await asyncio.sleep(delay_s)
        return list((await generate(engine, spec))["output_ids"])

    async def all_of_them() -> list[list[int]]:
        online = [spec for spec in requests if not spec[3]]
        delays_s = {spec[0]: 0.2 + 0.05 * place for place, spec in enumerate(online)}
        work = asyncio.gather(*(one(spec, delays_s.get(spec[0], 0.0)) for spec in requests))
        return await asyncio.wait_for(work, TIMEOUT_S)

    outputs = engine.loop.run_until_complete(all_of_them())
    return dict(zip([spec[0] for spec in requests], outputs, strict=True))


def test_outputs_are_those_of_one_stage(engine: Any, reference_outputs: Reference) -> None:
    """When online requests come is up to the machine: it is tried until requests gave way."""
    wanted = ("retracted", "paused")
    for seed in range(MOST_ROUNDS):
        requests = [(f"{seed}-{rid}", *rest) for rid, *rest in specs(seed)]
        assert serve(engine, requests) == reference_outputs(requests)
        assert is_flushed(engine), "something is left behind"
        offline = state(engine)["offline"]
        if all(offline[event] for event in wanted):
            break
    assert all(offline[event] for event in wanted), offline
    assert (offline["waiting"], offline["running"]) == (0, 0)


def test_aborted_requests_leave_nothing(engine: Any) -> None:
    """In every state: waiting, in either micro-batch, between two chunks, set aside."""
    requests = [(f"gone-{rid}", ids, 400, offline) for rid, ids, _, offline in specs(7)]

    async def abort_while_they_run() -> list[Any]:
        tasks = [asyncio.create_task(generate(engine, spec)) for spec in requests]
        for _ in range(4):
            await asyncio.sleep(0.15)
            for rid in ("gone-on1", "gone-off1", "gone-off5"):
                engine.tokenizer_manager.abort_request(rid=rid, abort_all=False)
        engine.tokenizer_manager.abort_request(abort_all=True)
        return await asyncio.wait_for(asyncio.gather(*tasks), TIMEOUT_S)

    answers = engine.loop.run_until_complete(abort_while_they_run())
    ends = {answer["meta_info"]["finish_reason"]["type"] for answer in answers}
    assert "abort" in ends
    assert is_flushed(engine), "something is left behind"
    short = ("after", [11, 12, 13], 4, True)
    assert len(engine.loop.run_until_complete(generate(engine, short))["output_ids"]) == 4
    assert_plans_see_both_micro_batches_and_replay_to_the_same(engine)


def assert_plans_see_both_micro_batches_and_replay_to_the_same(engine: Any) -> None:
    now = state(engine)
    assert now["safepoints"] == {"enabled": False, "reason": "pipeline parallelism"}
    assert now["prediction"]["mape"] is not None
    with engine.recording.open("rb") as lines:
        setup, read = read_recording(lines, "plans.jsonl")
        steps = list(read)
    replays = list(replay(steps, setup.make()))
    assert [plan.index for plan in replays if plan.differences] == []
    assert any(plan.snapshot.elsewhere for plan in replays)
    calls = [call for step in steps for call in step.calls]
    results = [call.result for call in calls if isinstance(call, Updated)]
    assert all(len(result.overlapping) == 2 for result in results if not result.batch.is_empty)
    assert any(result.concurrency == 2 for result in results)


@pytest.mark.heavy
def test_two_stages_of_two_ranks(small_model: Path, reference_outputs: Reference) -> None:
    with started(small_model, tp_size=2) as engine:
        requests = specs(3)
        assert serve(engine, requests) == reference_outputs(requests)
        assert is_flushed(engine)
