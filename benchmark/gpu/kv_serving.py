"""Offline decodes in the real engine, with and without checkpoints of their KV."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Any

from gpu.task import Task
from sglang_coserve.config import CoserveConfig

__all__ = ["decode_throughput"]


def decode_throughput(task: Task, mode: str) -> dict[str, Any]:
    """Return offline tokens/s of one closed batch, and the checkpoints' own state."""
    from sglang_coserve.srt.engine import CoserveEngine

    rows, prompt_tokens, output_tokens = (4, 64, 32) if task.dry_run else (64, 1024, 256)
    engine = CoserveEngine(
        model_path=str(task.model_path()),
        coserve_config=CoserveConfig.from_mapping(
            {
                "offline_policy": "coserve",
                "slo_ttft_ms": 2000.0,
                "startup_profile_seconds": 1.0,
                "kv_checkpoint": mode,
            }
        ),
        **task.engine_settings(),
    )
    rng = random.Random(0)
    params = {
        "max_new_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "custom_params": {"coserve_class": "offline"},
    }

    async def batch() -> float:
        prompts = [rng.choices(range(16, 512), k=prompt_tokens) for _ in range(rows)]
        began_s = time.perf_counter()
        await asyncio.gather(
            *(engine.async_generate(input_ids=ids, sampling_params=params) for ids in prompts)
        )
        return rows * output_tokens / (time.perf_counter() - began_s)

    try:
        engine.loop.run_until_complete(batch())
        per_s = [engine.loop.run_until_complete(batch()) for _ in range(1 if task.dry_run else 3)]
        states = engine.loop.run_until_complete(engine.tokenizer_manager.get_internal_state())
    finally:
        engine.shutdown()
    return {
        "mode": mode,
        "output_tokens_per_s": statistics.median(per_s),
        "all_output_tokens_per_s": per_s,
        "kv_checkpoint": states[0]["coserve"].get("kv_checkpoint"),
    }
