"""One measured window on a server that is running."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import httpx

from common.failures import RunFailedError
from common.model import ServedModel
from coserve_bench.offline_lines import read_requests
from coserve_bench.online_load import OnlineLoad, OnlineResult
from coserve_bench.options import Options
from coserve_bench.plan import RunKey
from coserve_bench.run_record import OfflineRecord
from coserve_bench.systems import System
from sglang_coserve.errors import ConfigError
from sglang_coserve.streamed_load import StreamedLoad
from sglang_coserve.workload import TraceRequest, poisson_arrivals

__all__ = ["Bench", "Measured"]

_IDLE_TIMEOUT_S = 60.0
_STEADY_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run gave."""

    online: OnlineResult
    offline: OfflineRecord | None


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs have in common."""

    options: Options
    model: ServedModel
    online: OnlineLoad
    offline_file: Path

    async def measure(
        self,
        base_url: str,
        key: RunKey,
        system: System,
        requests: Sequence[TraceRequest],
        say: Callable[[str], None],
    ) -> Measured:
        """Run both loads of ``key``: offline first, online once it is steady.

        Offline requests keep coming until the last online answer, and are
        counted within the window alone.

        Raises:
            RunFailedError: there is no result.
            ConfigError: the offline file was too short.
        """
        options = self.options
        await self.make_ready(base_url)
        await self.online.load(
            base_url,
            requests,
            vocab_size=self.model.vocab_size,
            seed=options.seed,
            body=system.online_body,
        )
        offline = self._offline_load(base_url, key, system) if system.has_offline else None
        async with offline or nullcontext():
            if offline is not None:
                say("warming up")
                await offline.until_steady(options.warmup_s, _STEADY_TIMEOUT_S)
            say("measuring")
            result = await self.online.go(
                self.options.online_warmup_s + self.options.window_s + self.options.drain_s
            )
            result = result.since(options.online_warmup_s)
            if offline is not None:
                self._check(offline)
        if all(not timeline.token_times_s for timeline in result.timelines):
            raise RunFailedError("every online request failed; see the server's log")
        if offline is None:
            return Measured(result, None)
        return Measured(
            result, OfflineRecord.of(offline.timelines(result.began_s), self.options.window_s)
        )

    async def make_ready(self, base_url: str) -> None:
        """Take care that nothing that ran before is left, and that no process stops for long.

        The server becomes idle and drops its prefix cache. Full garbage collections,
        which take a third of a second after SGLang's imports, are kept off: SGLang's
        operators do the same, and one of them in a run would be all that its P99 shows.

        Raises:
            RunFailedError: the server does not answer, or does not become idle.
        """
        gc.collect()
        gc.freeze()
        try:
            async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
                answer = await client.post(
                    "/flush_cache", params={"timeout": _IDLE_TIMEOUT_S}, timeout=2 * _IDLE_TIMEOUT_S
                )
                await client.post("/freeze_gc", timeout=_IDLE_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise RunFailedError(f"the server does not answer: {error}") from error
        if answer.status_code != 200:
            raise RunFailedError(f"the server did not become idle: {answer.text.strip()[:200]}")

    def _offline_load(self, base_url: str, key: RunKey, system: System) -> StreamedLoad:
        rate_per_s, seed = key.offline_per_s, self.options.seed
        return StreamedLoad(
            base_url,
            read_requests(self.offline_file, system.offline_body),
            concurrency=self.options.offline.concurrency,
            arrivals_s=None if rate_per_s is None else poisson_arrivals(rate_per_s, seed),
        )

    def _check(self, offline: StreamedLoad) -> None:
        offline.check()
        if offline.has_run_out:
            raise ConfigError(
                f"{self.offline_file}: all lines were sent before the online requests ended, so "
                "the run would measure the file's size: give a longer file (--offline-file), or "
                "more lines (--offline-lines)"
            )
