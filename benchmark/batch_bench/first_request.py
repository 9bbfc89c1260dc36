"""How long it takes from ``batches.create`` to the first request in the engine."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from batch_bench.setting import Setting
from common.batch_server import BatchServer, wait_until
from common.figures import Figure
from common.input_file import write_lines

__all__ = ["measure"]

_LINES: Final = 20
_BATCHES_PER_REPEAT: Final = 4
_TIMEOUT_S: Final = 120.0
_TARGET_MS: Final = 200.0
_POLL_S: Final = 0.002


def measure(server: BatchServer, setting: Setting) -> list[Figure]:
    """Ask the scheduler again and again whether it has a request; the answer's way is in it."""
    path = setting.work / "first.jsonl"
    write_lines(
        path,
        _LINES,
        vocab_size=setting.model.vocab_size,
        prompt_tokens=32,
        output_tokens=8,
        seed=setting.options.seed,
    )
    file_id = server.upload(path)
    _one(server, file_id)  # The first one finds a cold server.
    count = _BATCHES_PER_REPEAT * setting.options.repeats
    delays_ms = [_one(server, file_id) for _ in setting.track(count, "first requests")]
    server.client.files.delete(file_id)
    return [Figure("create to first request", "ms", tuple(delays_ms), at_most=_TARGET_MS)]


def _one(server: BatchServer, file_id: str) -> float:
    """Return the delay of one batch, in ms."""
    before = server.offline_received()

    def has_more() -> bool:
        return server.offline_received() > before

    with ThreadPoolExecutor(1) as watcher:
        began_s = time.perf_counter()
        watching: Future[None] = watcher.submit(
            wait_until, has_more, _TIMEOUT_S, "a request in the engine", _POLL_S
        )
        watching.add_done_callback(lambda _: ended_s.append(time.perf_counter()))
        ended_s: list[float] = []
        batch_id = server.create(file_id)
        watching.result(_TIMEOUT_S)
    server.until(batch_id, "completed", timeout_s=_TIMEOUT_S)
    return (ended_s[0] - began_s) * 1e3
