"""One engine, measured on request; for ``OwnProcess``."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil

ONLINE_OUTPUT_TOKENS: Final = 4
DECODED_TOKENS: Final = 64


@dataclass(frozen=True)
class SystemSpec:
    """What to start; without safepoints where the interval is 0."""

    model: Path
    context: int
    interval: int
    ttft_ms: float
    is_long: bool = False
    """Offline steps as long as prompts; else the defaults."""

    online_tokens: int = 32
    """Of an online prompt."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``ServerArgs`` in place of those for a CPU."""


@dataclass
class SafepointLoad:
    """What ran in some seconds."""

    seconds: float
    offline_tokens: int
    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    """Between the tokens of the online requests that decode all the time."""


class MeasuredEngine:
    """An engine and the measurements that can be made of it."""

    def __init__(self, spec: SystemSpec) -> None:
        from safepoint_bench.long_iterations import LongIterationsEngine
        from sglang_coserve.config import CoserveConfig
        from sglang_coserve.srt.engine import CoserveEngine

        self._rng = random.Random(0)
        self._online_tokens = spec.online_tokens
        engine = LongIterationsEngine if spec.is_long else CoserveEngine
        self._engine: Any = engine(
            model_path=str(spec.model),
            disable_radix_cache=True,
            **(
                spec.settings
                or {
                    "dtype": "float32",
                    "max_total_tokens": 4 * spec.context,
                    "chunked_prefill_size": spec.context,
                    "max_prefill_tokens": spec.context,
                    "sleep_on_idle": False,  # As wherever there is a GPU.
                }
            ),
            coserve_config=CoserveConfig(
                # ConServe's policy does not shorten steps for those who may arrive.
                offline_policy="conserve" if spec.is_long else "coserve",
                slo_ttft_ms=spec.ttft_ms,
                slo_tpot_ms=spec.ttft_ms,
                safepoint_interval=spec.interval,
                startup_profile_seconds=5.0,
            ),
        )
        self._vocabulary = range(10, 700)

    def close(self) -> None:
        """End the engine."""
        self._engine.shutdown()

    # --- Measurements --------------------------------------------------------------------

    def prefill_s(self, tokens: int) -> float:
        """Return how long an offline prompt of this length takes alone."""
        return float(self._run(self._first_token_s(self._tokens(tokens), offline=True)))

    def idle_ttft_ms(self, count: int) -> list[float]:
        """Return the TTFT of online requests that come one by one, at random times."""

        async def measure() -> list[float]:
            times_ms = []
            for _ in range(count):
                await asyncio.sleep(self._rng.uniform(0.05, 0.2))
                times_ms.append(await self._online_ttft_ms())
            return times_ms

        return list(self._run(measure()))

    def ttft_in_prefill_ms(self, tokens: int, prefill_s: float) -> float:
        """Return the TTFT of a request that comes somewhere in a long offline prefill."""

        async def measure() -> float:
            offline = asyncio.create_task(self._first_token_s(self._tokens(tokens), offline=True))
            await asyncio.sleep(self._rng.uniform(0.1, 0.8) * prefill_s)
            ttft_ms = await self._online_ttft_ms()
            await offline
            return ttft_ms

        return float(self._run(measure()))

    def load(
        self, seconds: float, arrivals_per_s: float, prompt_tokens: int, decoding: int = 0
    ) -> SafepointLoad:
        """Run an offline backlog for some seconds, with online arrivals at random times.

        ``decoding`` more online requests decode all the time, so that no step is of
        offline requests alone.
        """
        load = SafepointLoad(seconds, 0)

        async def offline(end_s: float) -> None:
            while time.perf_counter() < end_s:
                tokens = self._rng.randrange(prompt_tokens // 2, prompt_tokens)
                await self._first_token_s(self._tokens(tokens), offline=True)
                # One that ends late counts by the part before the end.
                load.offline_tokens += tokens if time.perf_counter() < end_s else 0

        async def online(end_s: float) -> None:
            async with asyncio.TaskGroup() as requests:
                while time.perf_counter() < end_s:
                    await asyncio.sleep(self._rng.expovariate(arrivals_per_s))
                    requests.create_task(one_online())

        async def one_online() -> None:
            load.ttft_ms.append(await self._online_ttft_ms())

        async def decodes(end_s: float) -> None:
            while time.perf_counter() < end_s:
                prompt = self._tokens(self._online_tokens)
                times_s = await self._token_times_s(prompt, DECODED_TOKENS, offline=False)
                load.gaps_ms += [(b - a) * 1e3 for a, b in pairwise(times_s)]

        async def both() -> None:
            end_s = time.perf_counter() + seconds
            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(offline(end_s))
                for _ in range(decoding):
                    group.create_task(decodes(end_s))
                if arrivals_per_s:
                    group.create_task(online(end_s))

        self._run(both())
        return load

    def idle_cpu_share(self, seconds: float) -> float:
        """Return what part of a core the scheduler's process takes while nothing happens."""
        schedulers = [
            process
            for process in psutil.Process().children(recursive=True)
            if "scheduler" in process.name() or "scheduler" in " ".join(process.cmdline())
        ]
        before_s = sum(sum(process.cpu_times()[:2]) for process in schedulers)
        time.sleep(seconds)
        after_s = sum(sum(process.cpu_times()[:2]) for process in schedulers)
        return (after_s - before_s) / seconds

    def status(self) -> dict[str, Any]:
        """Return what the scheduler says of its safepoints; nothing where it has none."""
        (state,) = self._run(self._engine.tokenizer_manager.get_internal_state())
        return dict(state["coserve"].get("safepoints", {}))

    # --- Requests ------------------------------------------------------------------------

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(self._vocabulary, k=count)

    async def _online_ttft_ms(self) -> float:
        return await self._first_token_s(self._tokens(self._online_tokens), offline=False) * 1e3

    async def _first_token_s(self, prompt: list[int], *, offline: bool) -> float:
        """Return when the first token came; the request has ended then."""
        count = 1 if offline else ONLINE_OUTPUT_TOKENS
        return (await self._token_times_s(prompt, count, offline=offline))[0]

    async def _token_times_s(
        self, prompt: list[int], max_new_tokens: int, *, offline: bool
    ) -> list[float]:
        """Return when each output came, from the start; a request's tokens come one by one."""
        params: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        if offline:
            params["custom_params"] = {"coserve_class": "offline"}
        started_s = time.perf_counter()
        outputs: AsyncIterator[Any] = await self._engine.async_generate(
            input_ids=prompt, sampling_params=params, stream=True
        )
        return [time.perf_counter() - started_s async for _ in outputs]

    def _run(self, work: Any) -> Any:
        return self._engine.loop.run_until_complete(work)
