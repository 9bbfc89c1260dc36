"""One engine, measured on request; for ``OwnProcess``."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ONLINE_OUTPUT_TOKENS: Final = 4


@dataclass(frozen=True)
class SystemSpec:
    """What to start; without safepoints where the interval is 0."""

    model: Path
    interval: int
    ttft_ms: float
    online_tokens: int
    """Of an online prompt."""

    settings: Mapping[str, Any]
    """Other fields of ``ServerArgs``."""


@dataclass
class SafepointLoad:
    """What ran in the time of a load."""

    offline_tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)


class MeasuredEngine:
    """An engine and the measurements that can be made of it."""

    def __init__(self, spec: SystemSpec) -> None:
        from sglang_coserve.config import CoserveConfig
        from sglang_coserve.srt.engine import CoserveEngine

        self._rng = random.Random(0)
        self._online_tokens = spec.online_tokens
        self._engine: Any = CoserveEngine(
            model_path=str(spec.model),
            disable_radix_cache=True,
            **spec.settings,
            coserve_config=CoserveConfig(
                offline_policy="coserve",
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

    def load(self, seconds: float, arrivals_per_s: float, prompt_tokens: int) -> SafepointLoad:
        """Run an offline backlog for some seconds, with online arrivals at random times."""
        load = SafepointLoad()

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

        async def both() -> None:
            end_s = time.perf_counter() + seconds
            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(offline(end_s))
                group.create_task(online(end_s))

        self._run(both())
        return load

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
        params: dict[str, Any] = {
            "max_new_tokens": count,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        if offline:
            params["custom_params"] = {"coserve_class": "offline"}
        started_s = time.perf_counter()
        outputs: AsyncIterator[Any] = await self._engine.async_generate(
            input_ids=prompt, sampling_params=params, stream=True
        )
        times_s = [time.perf_counter() - started_s async for _ in outputs]
        return times_s[0]

    def _run(self, work: Any) -> Any:
        return self._engine.loop.run_until_complete(work)
