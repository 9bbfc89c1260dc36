"""Our server with checkpoints and without, under bursts that preempt offline work all the time."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang_coserve.local_server import LocalServer
from sglang_coserve.srt import cpu

__all__ = ["LOADS", "Load", "Run", "run"]

OFFLINE_STREAM_INTERVAL = 16  # The client runs on the server's cores.
TTFT_TARGET_MS = 2000


@dataclass(frozen=True, slots=True)
class Load:
    """Offline requests that never run out, and bursts of online ones."""

    name: str
    kv_tokens: int
    offline_concurrency: int
    offline_prompt_tokens: int
    offline_output_tokens: int
    burst_every_s: float
    burst_requests: int
    online_prompt_tokens: int
    online_output_tokens: int


LOADS = (
    # Long outputs: what is lost is mostly generated, and little is computed for each token.
    Load(
        "outputs",
        kv_tokens=8192,
        offline_concurrency=16,
        offline_prompt_tokens=128,
        offline_output_tokens=640,
        burst_every_s=2.0,
        burst_requests=2,
        online_prompt_tokens=1200,
        online_output_tokens=8,
    ),
    # Long prompts: MultiNews and BurstGPT as in ConServe, table 1, at a quarter of their lengths.
    Load(
        "documents",
        kv_tokens=16384,
        offline_concurrency=12,
        offline_prompt_tokens=1729,
        offline_output_tokens=98,
        burst_every_s=2.0,
        burst_requests=4,
        online_prompt_tokens=687,
        online_output_tokens=67,
    ),
)


@dataclass(frozen=True, slots=True)
class Run:
    """What one server made of a load."""

    load: str
    repeat: int
    mode: str
    offline_tokens_per_s: float
    online_p50_ttft_ms: float
    online_p99_ttft_ms: float
    online_requests: int
    evicted: int
    recomputed_tokens: int
    recompute_tax: float
    kv_checkpoint: dict[str, Any]

    @property
    def recomputed_per_eviction(self) -> float:
        """Offline tokens computed again for each row that was evicted."""
        return self.recomputed_tokens / self.evicted if self.evicted else 0.0

    def summary(self) -> str:
        """Return one line."""
        return (
            f"{self.load} {self.repeat} {self.mode}: "
            f"{self.offline_tokens_per_s:.1f} offline tokens/s, "
            f"P99 TTFT {self.online_p99_ttft_ms:.0f} ms of {self.online_requests}, "
            f"{self.evicted} evicted, tax {self.recompute_tax:.2%}"
        )


def run(
    load: Load,
    repeat: int,
    mode: str,
    *,
    page_size: int,
    model: Path,
    work: Path,
    seconds: float,
) -> Run:
    """Start a server, load it, and return its figures."""
    flags = ["--model-path", str(model), "--log-level", "warning"]
    flags += ["--max-total-tokens", str(load.kv_tokens), "--page-size", str(page_size)]
    flags += ["--offline-policy", "coserve", "--slo-ttft-ms", str(TTFT_TARGET_MS)]
    flags += ["--kv-checkpoint", mode]
    cores = nullcontext() if cpu.has_cuda() else cpu.divided_cores(1)
    log_path = work / f"{load.name}-{mode}-{repeat}.log"
    with cores, LocalServer(flags, log_path=log_path) as server:
        return asyncio.run(_send(load, server.base_url, repeat, mode, seconds))


async def _send(load: Load, base_url: str, repeat: int, mode: str, seconds: float) -> Run:
    """Send both classes for so long; the same prompts for every mode of a repeat."""
    rng = random.Random(repeat)
    tokens = [0]
    ttfts_ms: list[float] = []
    end_s = time.perf_counter() + seconds

    async with httpx.AsyncClient(base_url=base_url, timeout=None) as client:

        async def offline_loop(stream: random.Random) -> None:
            while time.perf_counter() < end_s:
                prompt = stream.choices(range(16, 700), k=load.offline_prompt_tokens)
                async for _ in generated(client, prompt, load.offline_output_tokens, offline=True):
                    tokens[0] += time.perf_counter() < end_s

        async def online_request(prompt: list[int]) -> None:
            begin_s, is_first = time.perf_counter(), True
            async for _ in generated(client, prompt, load.online_output_tokens, offline=False):
                if is_first:
                    ttfts_ms.append((time.perf_counter() - begin_s) * 1e3)
                is_first = False

        async def bursts() -> None:
            arrivals = []
            while time.perf_counter() + load.burst_every_s < end_s:
                await asyncio.sleep(load.burst_every_s)
                for _ in range(load.burst_requests):
                    prompt = rng.choices(range(16, 700), k=load.online_prompt_tokens)
                    arrivals.append(asyncio.create_task(online_request(prompt)))
            await asyncio.gather(*arrivals)

        loops = [
            asyncio.create_task(offline_loop(random.Random((repeat + 1) * 1000 + number)))
            for number in range(load.offline_concurrency)
        ]
        await bursts()
        await asyncio.sleep(max(0.0, end_s - time.perf_counter()))
        status = (await client.get("/coserve/status")).json()["replicas"][0]
        for task in loops:
            task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
    checkpointing = status["kv_checkpoint"]
    offline = checkpointing["classes"]["offline"]
    percentiles = statistics.quantiles(ttfts_ms, n=100)
    return Run(
        load.name,
        repeat,
        mode,
        tokens[0] / seconds,
        percentiles[49],
        percentiles[98],
        len(ttfts_ms),
        status["offline"]["evicted"],
        offline["recomputed_tokens"],
        offline["recompute_tax"],
        checkpointing,
    )


async def generated(
    client: httpx.AsyncClient, prompt: list[int], max_new_tokens: int, *, offline: bool
) -> Any:
    """Yield once for every token of one request that has come."""
    sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
    if offline:
        sampling["custom_params"] = {"coserve_class": "offline"}
        sampling["stream_interval"] = OFFLINE_STREAM_INTERVAL
    body = {"input_ids": prompt, "sampling_params": {**sampling, "temperature": 0.0}}
    seen = 0
    async with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                count = json.loads(line[6:])["meta_info"]["completion_tokens"]
                for _ in range(count - seen):
                    yield
                seen = count
