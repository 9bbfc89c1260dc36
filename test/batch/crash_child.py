"""The service in a process of its own, to be killed: two batches, to their ends.

``python crash_child.py DIRECTORY LINES ENGINE_LOG`` prints ``ready`` when the batches
run and ``done`` when they have ended. Whenever the engine takes a line, the log gets
its batch, its id and the number of tokens it is continued from.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from batch.scenarios import OWNER, lines, stream, wanted
from batch.scripted_backend import ENDPOINT, answer, failure, name_of, tokens_of
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.service import BatchService
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.backend import Backend, BackendLoad, LineRequest, LineResult

NUM_BATCHES = 2
NUM_TOKENS = 40
STEP_S = 0.002


class SteadyEngine(Backend):
    """Generates a token of every line in flight, again and again; every tenth line is bad."""

    model = "steady"
    endpoints = frozenset({ENDPOINT})
    limits = BodyLimits()

    def __init__(self, log_path: Path) -> None:
        self._log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def run(
        self, request: LineRequest, on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        entry = f"{request.batch_id} {name_of(request)} {len(request.generated)}\n"
        os.write(self._log, entry.encode())
        tokens = tokens_of(name_of(request), NUM_TOKENS)
        assert list(request.generated) == tokens[: len(request.generated)], "not its tokens"
        if request.line % 10 == 0:
            return failure(400)
        for token in tokens[len(request.generated) :]:
            await asyncio.sleep(STEP_S)
            on_tokens([token])
        return answer(request)

    def load(self) -> BackendLoad:
        return BackendLoad(None)


def say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


async def main(directory: Path, num_lines: int, log_path: Path) -> None:
    limits = BatchLimits(
        max_in_flight=8, flush_interval_s=0.01, journal_interval_s=0.01, journal_compact_bytes=4096
    )
    async with await BatchService.open(directory, SteadyEngine(log_path), limits) as service:
        known = (await service.list_batches(OWNER)).data
        for number in range(len(known), NUM_BATCHES):
            content = lines(num_lines, f"b{number}", max_tokens=NUM_TOKENS)
            file = await service.create_file(OWNER, "in.jsonl", stream(content, 100))
            await service.create_batch(OWNER, wanted(file), f"key-{number}")
        say("ready")
        while (await service.status()).batches:
            await asyncio.sleep(0.01)
        say("done")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
