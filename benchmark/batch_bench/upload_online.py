"""Online TTFT while a file is uploaded and checked, and without."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Final

import httpx

from batch_bench.batch_server import BatchServer
from batch_bench.figures import Figure
from batch_bench.input_file import long_lines
from batch_bench.setting import Setting
from coserve_bench.failures import RunFailedError
from coserve_bench.online_load import OnlineLoad
from coserve_bench.online_requests import OnlineSpec, online_requests
from sglang_coserve.metrics import latency_report

__all__ = ["measure"]

_DRAIN_S: Final = 120.0
_CHECK_TIMEOUT_S: Final = 300.0
_CALL_TIMEOUT_S: Final = 120.0
_LOWEST_PRIORITY: Final = 19
_TARGET_RATIO: Final = 1.05


def measure(server: BatchServer, setting: Setting) -> list[Figure]:
    """Same arrivals with and without, in turn; all the while one upload follows another."""
    path = setting.work / "upload.jsonl"
    long_lines(path, setting.options.upload_lines, setting.options.upload_mb * 10**6)
    try:
        quiet_ms, busy_ms, uploads = asyncio.run(_measure(server, setting, path))
    finally:
        path.unlink()
    ratios = tuple(busy / quiet for quiet, busy in zip(quiet_ms, busy_ms, strict=True))
    return [
        Figure("online P99 TTFT alone", "ms", tuple(quiet_ms)),
        Figure("online P99 TTFT beside uploads", "ms", tuple(busy_ms)),
        Figure("online P99 TTFT, ratio", "×", ratios, at_most=_TARGET_RATIO),
        Figure("files uploaded and checked meanwhile", "", tuple(uploads)),
    ]


async def _measure(
    server: BatchServer, setting: Setting, path: Path
) -> tuple[list[float], list[float], list[float]]:
    quiet_ms: list[float] = []
    busy_ms: list[float] = []
    uploads: list[float] = []
    load = OnlineLoad(setting.work, setting.logs / "bench_serving.log")
    try:
        await _p99_ttft_ms(server, setting, load)  # The first one finds a cold server.
        for repeat in setting.track(setting.options.repeats, "uploads beside online requests"):
            # Who comes first alternates, so that a slow change of the machine favours neither.
            for is_busy in (False, True) if repeat % 2 == 0 else (True, False):
                if not is_busy:
                    quiet_ms.append(await _p99_ttft_ms(server, setting, load))
                    continue
                uploading = _Uploading(server, path)
                async with asyncio.TaskGroup() as tasks:
                    thread = tasks.create_task(asyncio.to_thread(uploading.run))
                    try:
                        busy_ms.append(await _p99_ttft_ms(server, setting, load))
                    finally:
                        uploading.is_over.set()
                uploads.append(thread.result())
    finally:
        await load.close()
    return quiet_ms, busy_ms, uploads


async def _p99_ttft_ms(server: BatchServer, setting: Setting, load: OnlineLoad) -> float:
    options = setting.options
    requests = online_requests(
        OnlineSpec(),
        options.online_rate_per_s,
        options.online_window_s,
        options.seed,
        setting.model.max_context_tokens,
    )
    async with httpx.AsyncClient(base_url=server.base_url, trust_env=False) as client:
        await client.post("/flush_cache", params={"timeout": 30}, timeout=_CALL_TIMEOUT_S)
    await load.load(
        server.base_url,
        setting.model.path,
        requests,
        vocab_size=setting.model.vocab_size,
        seed=options.seed,
        body={},
    )
    result = await load.go(options.online_window_s + _DRAIN_S)
    p99_s = latency_report(result.timelines).ttft.p99_s
    if p99_s is None:
        raise RunFailedError("every online request failed; see the server's log")
    return p99_s * 1e3


class _Uploading:
    """Uploads a file and has it checked, again and again, in a thread."""

    def __init__(self, server: BatchServer, path: Path) -> None:
        self._server = server
        self._path = path
        self.is_over = threading.Event()

    def run(self) -> int:
        """Return how many files that were."""
        # A client elsewhere would take nothing of the server's processor. Linux has a priority
        # for each thread.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        count = 0
        while not self.is_over.is_set():
            file_id = self._server.upload(self._path)
            batch_id = self._server.create_paused(file_id)
            self._server.until(batch_id, "in_progress", timeout_s=_CHECK_TIMEOUT_S)
            self._server.cancel(batch_id)
            self._server.client.files.delete(file_id)
            count += 1
        return count
