"""How fast the server checks an input file."""

from __future__ import annotations

import time
from typing import Final

from batch_bench.setting import Setting
from common.batch_server import BatchServer
from common.figures import Figure
from common.input_file import long_lines

__all__ = ["measure"]

_LINE_BYTES: Final = 500
_TIMEOUT_S: Final = 600.0
_TARGET_LINES_PER_S: Final = 50_000


def measure(server: BatchServer, setting: Setting) -> list[Figure]:
    """Time from asking for a batch to its being in progress; the start of the check is in it."""
    count = setting.options.validate_lines
    path = setting.work / "validate.jsonl"
    long_lines(path, count, count * _LINE_BYTES)
    file_id = server.upload(path)
    seconds = []
    for _ in setting.track(setting.options.repeats, f"validating {count:,} lines"):
        began_s = time.perf_counter()
        batch_id = server.create_paused(file_id)
        server.until(batch_id, "in_progress", timeout_s=_TIMEOUT_S, poll_s=0.01)
        seconds.append(time.perf_counter() - began_s)
        server.cancel(batch_id)
    server.client.files.delete(file_id)
    rates = tuple(count / value for value in seconds)
    megabytes = path.stat().st_size / 1e6
    path.unlink()
    return [
        Figure("validation", "lines/s", rates, at_least=_TARGET_LINES_PER_S),
        Figure("validation", "MB/s", tuple(megabytes / value for value in seconds)),
    ]
