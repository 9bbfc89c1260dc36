"""How much memory a large file takes in the server."""

from __future__ import annotations

import threading
import time
from typing import Final, Self

import psutil

from batch_bench.setting import Setting
from common.batch_server import BatchServer
from common.figures import Figure
from common.input_file import long_lines

__all__ = ["MemoryWatch", "measure"]

_SAMPLE_S: Final = 0.02
_CHECK_TIMEOUT_S: Final = 900.0
_WARM_UP_LINES: Final = 600
"""More than may be in the engine at once: it then has the buffers that it will need."""

_WARM_UP_TIMEOUT_S: Final = 300.0
_TARGET_MB: Final = 500.0


def measure(server: BatchServer, setting: Setting) -> list[Figure]:
    """Upload a file over HTTP, have it checked and served for a while, then cancel."""
    options = setting.options
    count, path = options.memory_lines, setting.work / "memory.jsonl"
    steps = setting.track(5, f"{count:,} lines of {options.memory_mb:,} MB")
    next(steps)
    _warm_up(server, setting)
    long_lines(path, count, options.memory_mb * 10**6)
    next(steps)
    with MemoryWatch(server.pid) as watch:
        began_s = time.perf_counter()
        file_id = server.upload(path)
        uploaded_s = time.perf_counter()
        path.unlink()
        upload_mb = watch.grown_mb
        next(steps)
        batch_id = server.create(file_id)
        server.until(batch_id, "in_progress", timeout_s=_CHECK_TIMEOUT_S)
        checked_s = time.perf_counter()
        check_mb = watch.grown_mb
        next(steps)
        time.sleep(options.serve_s)
        served = server.client.batches.retrieve(batch_id).request_counts
        next(steps)
        server.cancel(batch_id)
        server.client.files.delete(file_id)
    steps.close()
    assert served is not None
    return [
        Figure("lines", "", (count,)),
        Figure("peak memory over idle", "MB", (watch.grown_mb,), at_most=_TARGET_MB),
        Figure("peak memory until uploaded", "MB", (upload_mb,)),
        Figure("peak memory until checked", "MB", (check_mb,)),
        Figure("upload", "s", (uploaded_s - began_s,)),
        Figure("validation", "s", (checked_s - uploaded_s,)),
        Figure("lines served meanwhile", "", (served.completed,)),
    ]


def _warm_up(server: BatchServer, setting: Setting) -> None:
    path = setting.work / "warm_up.jsonl"
    options = setting.options
    line_bytes = options.memory_mb * 10**6 // options.memory_lines
    long_lines(path, _WARM_UP_LINES, _WARM_UP_LINES * line_bytes)
    file_id = server.upload(path)
    server.until(server.create(file_id), "completed", timeout_s=_WARM_UP_TIMEOUT_S)
    server.client.files.delete(file_id)


class MemoryWatch:
    """Samples the resident memory of a process and its children while it is entered."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._command = self._process.cmdline()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._first_bytes = self._peak_bytes = self._resident_bytes()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def grown_mb(self) -> float:
        """The peak so far, less what there was at first, in megabytes."""
        return (self._peak_bytes - self._first_bytes) / 1e6

    def _sample(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            self._peak_bytes = max(self._peak_bytes, self._resident_bytes())

    def _resident_bytes(self) -> int:
        total = int(self._process.memory_info().rss)
        for child in self._process.children(recursive=True):
            try:
                # Between fork and exec a child shows its parent's memory as its own.
                if child.cmdline() != self._command:
                    total += child.memory_info().rss
            except psutil.Error:
                continue  # It has just ended.
        return total
