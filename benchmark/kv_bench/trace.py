"""Our server with checkpoints and without, under bursts that preempt offline work all the time."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from sglang_coserve.demo.servers import make_server
from sglang_coserve.metrics import throughput
from sglang_coserve.streamed_load import StreamedLoad, StreamedRequest

__all__ = ["LOADS", "BurstLoad", "BurstRun", "run"]

OFFLINE_STREAM_INTERVAL = 16  # The client runs on the server's cores.
TTFT_TARGET_MS = 2000


@dataclass(frozen=True, slots=True)
class BurstLoad:
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
    BurstLoad(
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
    BurstLoad(
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
class BurstRun:
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
        """Offline tokens computed again for each retraction."""
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
    load: BurstLoad,
    repeat: int,
    mode: str,
    *,
    page_size: int,
    flags: Sequence[str],
    work: Path,
    seconds: float,
) -> BurstRun:
    """Start a server, load it, and return its figures."""
    flags = [*flags, "--log-level", "warning"]
    flags += ["--max-total-tokens", str(load.kv_tokens), "--page-size", str(page_size)]
    flags += ["--offline-policy", "coserve", "--slo-ttft-ms", str(TTFT_TARGET_MS)]
    flags += ["--kv-checkpoint", mode]
    log_path = work / f"{load.name}-{mode}-{repeat}.log"
    with make_server(flags, is_ours=True, log_path=log_path) as server:
        return asyncio.run(_send(load, server.base_url, repeat, mode, seconds))


async def _send(load: BurstLoad, base_url: str, repeat: int, mode: str, seconds: float) -> BurstRun:
    """Send both classes for so long; the same prompts for every mode of a repeat."""
    offline_requests = _requests(
        random.Random(repeat + 1000),
        load.offline_prompt_tokens,
        load.offline_output_tokens,
        custom_params={"coserve_class": "offline"},
        stream_interval=OFFLINE_STREAM_INTERVAL,
    )
    online_requests = _requests(
        random.Random(repeat), load.online_prompt_tokens, load.online_output_tokens
    )
    bursts = range(1, int(seconds / load.burst_every_s))
    arrivals_s = [load.burst_every_s * n for n in bursts for _ in range(load.burst_requests)]
    began_s = time.perf_counter()
    async with StreamedLoad(
        base_url, offline_requests, concurrency=load.offline_concurrency
    ) as offline:
        async with StreamedLoad(base_url, online_requests, arrivals_s=arrivals_s) as online:
            await online.finished()
        await asyncio.sleep(max(0.0, began_s + seconds - time.perf_counter()))
        async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
            status = (await client.get("/coserve/status")).json()["replicas"][0]
    checkpointing = status["kv_checkpoint"]
    found = checkpointing["classes"]["offline"]
    ttfts_s = [t.ttft_s for t in online.timelines(began_s) if t.ttft_s is not None]
    percentiles = statistics.quantiles(ttfts_s, n=100)
    return BurstRun(
        load.name,
        repeat,
        mode,
        throughput(offline.timelines(began_s), 0.0, seconds).output_tokens_per_s,
        percentiles[49] * 1e3,
        percentiles[98] * 1e3,
        len(ttfts_s),
        status["offline"]["retracted"],
        found["recomputed_tokens"],
        found["recompute_tax"],
        checkpointing,
    )


def _requests(
    rng: random.Random, prompt_tokens: int, output_tokens: int, **sampling: Any
) -> Iterator[StreamedRequest]:
    """Yield requests without end, on SGLang's own route."""
    params = {"max_new_tokens": output_tokens, "ignore_eos": True, "temperature": 0.0, **sampling}
    for number in count():
        prompt = rng.choices(range(16, 700), k=prompt_tokens)
        body = {"input_ids": prompt, "sampling_params": params, "stream": True}
        yield StreamedRequest(f"request-{number}", "/generate", body)
