"""Online TTFT while a file is uploaded and checked, while it is only sent, and without."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx
import openai

from batch_bench.online_load import OnlineLoad, online_requests
from batch_bench.setting import Setting
from common.batch_server import BatchServer, openai_client, upload
from common.failures import RunFailedError
from common.figures import Figure
from common.input_file import long_lines
from common.null_server import NullServer, lowest_priority
from sglang_coserve.metrics import latency_report

__all__ = ["measure"]

_DRAIN_S: Final = 120.0
_CHECK_TIMEOUT_S: Final = 300.0
_CALL_TIMEOUT_S: Final = 120.0
_TARGET_RATIO: Final = 1.05


def measure(server: BatchServer, setting: Setting) -> list[Figure]:
    """Same arrivals alone, beside one upload after another, and beside as many to nowhere."""
    path = setting.work / "upload.jsonl"
    long_lines(path, setting.options.upload_lines, setting.options.upload_mb * 10**6)
    try:
        with NullServer(is_idle=True) as sink, openai_client(sink.base_url) as client:
            runs = _Runs(server, client, setting, path)
            asyncio.run(runs.run())
    finally:
        path.unlink()
    return runs.figures()


class _Runs:
    """The three kinds of runs in turn, and what they gave."""

    def __init__(
        self, server: BatchServer, sink: openai.OpenAI, setting: Setting, path: Path
    ) -> None:
        self._server = server
        self._sink = sink
        self._setting = setting
        self._path = path
        self._alone_ms: list[float] = []
        self._uploads_ms: list[float] = []
        self._client_ms: list[float] = []
        self._uploads: list[float] = []

    def figures(self) -> list[Figure]:
        """Return the figures of all runs."""
        ratios = _ratios(self._uploads_ms, self._alone_ms)
        of_client = _ratios(self._client_ms, self._alone_ms)
        of_server = _ratios(self._uploads_ms, self._client_ms)
        return [
            Figure("online P99 TTFT alone", "ms", tuple(self._alone_ms)),
            Figure("online P99 TTFT beside uploads", "ms", tuple(self._uploads_ms)),
            Figure("online P99 TTFT beside their client alone", "ms", tuple(self._client_ms)),
            Figure("online P99 TTFT, uploads / alone", "×", ratios, at_most=_TARGET_RATIO),
            Figure("online P99 TTFT, client / alone", "×", of_client),
            Figure("online P99 TTFT, uploads / client", "×", of_server, at_most=_TARGET_RATIO),
            Figure("files uploaded and checked meanwhile", "", tuple(self._uploads)),
        ]

    async def run(self) -> None:
        """Measure all repeats."""
        options, setting = self._setting.options, self._setting
        load = OnlineLoad()
        try:
            await self._p99_ttft_ms(load)  # The first one finds a cold server.
            for repeat in setting.track(options.repeats, "uploads beside online requests"):
                # Who comes first alternates, so that a slow change of the machine favours nobody.
                if repeat % 2 == 0:
                    self._alone_ms.append(await self._p99_ttft_ms(load))
                began_s = time.perf_counter()
                count = await self._beside(load, self._upload_and_check, self._uploads_ms)
                each_s = (time.perf_counter() - began_s) / max(count, 1)
                self._uploads.append(count)
                # As many bytes in the same time: the sink would take more of them.
                send = _at_intervals(self._send_to_nowhere, each_s)
                await self._beside(load, send, self._client_ms)
                if repeat % 2 == 1:
                    self._alone_ms.append(await self._p99_ttft_ms(load))
        finally:
            await load.close()

    async def _beside(
        self, load: OnlineLoad, work: Callable[[], None], found_ms: list[float]
    ) -> int:
        """Measure while ``work`` is done again and again; return how often it was."""
        is_over = threading.Event()

        def repeat() -> int:
            # A client elsewhere would take nothing of the server's processor.
            lowest_priority()
            count = 0
            while not is_over.is_set():
                work()
                count += 1
            return count

        # A thread that ends with it, since its priority is for good.
        with ThreadPoolExecutor(1) as client:
            counting = asyncio.get_running_loop().run_in_executor(client, repeat)
            try:
                found_ms.append(await self._p99_ttft_ms(load))
            finally:
                is_over.set()
            return await counting

    def _upload_and_check(self) -> None:
        file_id = self._server.upload(self._path)
        batch_id = self._server.create_paused(file_id)
        self._server.until(batch_id, "in_progress", timeout_s=_CHECK_TIMEOUT_S)
        self._server.cancel(batch_id)
        self._server.client.files.delete(file_id)

    def _send_to_nowhere(self) -> None:
        upload(self._sink, self._path)

    async def _p99_ttft_ms(self, load: OnlineLoad) -> float:
        options, setting = self._setting.options, self._setting
        requests = online_requests(
            options.online_rate_per_s,
            options.online_window_s,
            options.seed,
            setting.model.max_context_tokens,
        )
        url = self._server.base_url
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            await client.post("/flush_cache", params={"timeout": 30}, timeout=_CALL_TIMEOUT_S)
        await load.load(url, requests, vocab_size=setting.model.vocab_size, seed=options.seed)
        timelines = await load.go(options.online_window_s + _DRAIN_S)
        p99_s = latency_report(timelines).ttft.p99_s
        if p99_s is None:
            raise RunFailedError("every online request failed; see the server's log")
        return p99_s * 1e3


def _at_intervals(work: Callable[[], None], interval_s: float) -> Callable[[], None]:
    """Return ``work`` that takes at least ``interval_s`` each time."""

    def paced() -> None:
        began_s = time.perf_counter()
        work()
        time.sleep(max(0.0, interval_s - (time.perf_counter() - began_s)))

    return paced


def _ratios(above: list[float], below: list[float]) -> tuple[float, ...]:
    return tuple(a / b for a, b in zip(above, below, strict=True))
