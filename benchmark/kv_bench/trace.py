"""Our server with checkpoints and without, under bursts that preempt offline work all the time."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang_coserve.local_server import LocalServer
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.srt import cpu

__all__ = ["compare"]

KV_TOKENS = 8192
OFFLINE_CONCURRENCY = 16
OFFLINE_PROMPT_TOKENS, OFFLINE_OUTPUT_TOKENS = 128, 640
BURST_EVERY_S, BURST_REQUESTS = 2.0, 3
ONLINE_PROMPT_TOKENS, ONLINE_OUTPUT_TOKENS = 1800, 8
TTFT_TARGET_MS = 2000
OFF = "off"


@dataclass(frozen=True, slots=True)
class Run:
    """What one server made of the load."""

    repeat: int
    mode: str
    offline_tokens_per_s: float
    online_p99_ttft_ms: float
    recompute_tax: float
    evicted: int
    kv_checkpoint: dict[str, Any]


def compare(mode: str, repeats: int, seconds: float, out: Path | None) -> None:
    """Run both, interleaved, and print the figures."""
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as work:
        model = make_small_model(Path(work) / "model", SmallModelSpec())
        for repeat, kind in itertools.product(range(repeats), (OFF, mode)):
            runs.append(run(repeat, kind, model, Path(work), seconds))
            print(runs[-1], flush=True)
    for name in ("offline_tokens_per_s", "online_p99_ttft_ms", "recompute_tax"):
        by_mode = {
            kind: [getattr(entry, name) for entry in runs if entry.mode == kind]
            for kind in (OFF, mode)
        }
        line = f"{name:22}"
        for kind, values in by_mode.items():
            low, high = min(values), max(values)
            line += f" {kind} {statistics.median(values):.4g} [{low:.4g}, {high:.4g}]"
        ratios = [on / off for off, on in zip(by_mode[OFF], by_mode[mode], strict=True) if off]
        if ratios:
            line += f" ratio {statistics.median(ratios):.3f}"
        print(line)
    if out is not None:
        out.write_text(json.dumps([asdict(entry) for entry in runs], indent=1))


def run(repeat: int, mode: str, model: Path, work: Path, seconds: float) -> Run:
    """Start a server, load it, and return its figures."""
    flags = ["--model-path", str(model), "--log-level", "warning"]
    flags += ["--max-total-tokens", str(KV_TOKENS), "--offline-policy", "coserve"]
    flags += ["--slo-ttft-ms", str(TTFT_TARGET_MS), "--kv-checkpoint", mode]
    cores = nullcontext() if cpu.has_cuda() else cpu.divided_cores(1)
    with cores, LocalServer(flags, log_path=work / f"{mode}-{repeat}.log") as server:
        return asyncio.run(load(server.base_url, repeat, mode, seconds))


async def load(base_url: str, repeat: int, mode: str, seconds: float) -> Run:
    """Send both classes for so long; the same prompts for every mode of a repeat."""
    rng = random.Random(repeat)
    tokens = [0]
    ttfts_ms: list[float] = []
    end_s = time.perf_counter() + seconds

    async with httpx.AsyncClient(base_url=base_url, timeout=None) as client:

        async def offline_loop(stream: random.Random) -> None:
            while time.perf_counter() < end_s:
                prompt = stream.choices(range(16, 700), k=OFFLINE_PROMPT_TOKENS)
                async for _ in generated(client, prompt, OFFLINE_OUTPUT_TOKENS, offline=True):
                    tokens[0] += time.perf_counter() < end_s

        async def online_request(prompt: list[int]) -> None:
            begin_s, is_first = time.perf_counter(), True
            async for _ in generated(client, prompt, ONLINE_OUTPUT_TOKENS, offline=False):
                if is_first:
                    ttfts_ms.append((time.perf_counter() - begin_s) * 1e3)
                is_first = False

        async def bursts() -> None:
            arrivals = []
            while time.perf_counter() + BURST_EVERY_S < end_s:
                await asyncio.sleep(BURST_EVERY_S)
                for _ in range(BURST_REQUESTS):
                    prompt = rng.choices(range(16, 700), k=ONLINE_PROMPT_TOKENS)
                    arrivals.append(asyncio.create_task(online_request(prompt)))
            await asyncio.gather(*arrivals)

        loops = [
            asyncio.create_task(offline_loop(random.Random((repeat + 1) * 1000 + number)))
            for number in range(OFFLINE_CONCURRENCY)
        ]
        await bursts()
        await asyncio.sleep(max(0.0, end_s - time.perf_counter()))
        status = (await client.get("/coserve/status")).json()["replicas"][0]
        for task in loops:
            task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
    checkpointing = status["kv_checkpoint"]
    return Run(
        repeat,
        mode,
        tokens[0] / seconds,
        statistics.quantiles(ttfts_ms, n=100)[98],
        checkpointing["classes"]["offline"]["recompute_tax"],
        status["offline"]["evicted"],
        checkpointing,
    )


async def generated(
    client: httpx.AsyncClient, prompt: list[int], max_new_tokens: int, *, offline: bool
) -> Any:
    """Yield once for every token of one request."""
    sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
    if offline:
        sampling["custom_params"] = {"coserve_class": "offline"}
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
