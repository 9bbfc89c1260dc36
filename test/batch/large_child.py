"""A batch of many lines in a process of its own, to see what it takes.

``python large_child.py DIRECTORY LINES`` prints the peak memory of each step as JSON.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from batch.scenarios import OWNER, line, wanted
from batch.scripted_backend import ENDPOINT, answer
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.service import BatchService
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.backend import Backend, BackendLoad, LineRequest, LineResult

TOKENS = list(range(500))
LIMITS = BatchLimits(max_lines=10_000_000, max_upload_bytes=4 << 30)


class InstantEngine(Backend):
    """Answers at once and remembers nothing."""

    model = "instant"
    endpoints = frozenset({ENDPOINT})
    limits = BodyLimits()

    async def run(
        self, request: LineRequest, on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        on_tokens(TOKENS)
        await asyncio.sleep(0)
        return answer(request)

    def load(self) -> BackendLoad:
        return BackendLoad(None)


async def many_lines(count: int) -> AsyncIterator[bytes]:
    """Lines of about 500 bytes each."""
    prompt = "word " * 80
    for number in range(count):
        yield line(f"id-{number}", prompt=prompt, max_tokens=4).encode() + b"\n"


def own_peak_mib() -> float:
    """Return the peak of this program; ``ru_maxrss`` counts the process that forked it, too."""
    status = Path("/proc/self/status").read_text()
    return round(int(status.split("VmHWM:")[1].split()[0]) / 1024, 1)


def child_peak_mib() -> float:
    """Return the highest peak of a child that has ended, or this process's when it forked one."""
    return round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1)


async def main(directory: Path, count: int) -> None:
    found: dict[str, float] = {"start_mib": own_peak_mib()}
    async with await BatchService.open(directory, InstantEngine(), LIMITS) as service:
        file = await service.create_file(OWNER, "in", many_lines(count))
        batch = await service.create_batch(OWNER, wanted(file))
        while batch.status == "validating":
            await asyncio.sleep(0.05)
            batch = await service.retrieve_batch(OWNER, batch.id)
        found["validator_mib"] = child_peak_mib()
        while batch.status in ("in_progress", "finalizing"):
            await asyncio.sleep(0.05)
            batch = await service.retrieve_batch(OWNER, batch.id)
        found["completed"] = batch.request_counts.completed
    found["server_mib"] = own_peak_mib()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
