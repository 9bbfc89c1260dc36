"""The processes that read input files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.record import JobRecord
from sglang_coserve.batch.state import Failed, Validated
from sglang_coserve.jsonl.check_file import CheckLimits, LineFault
from sglang_coserve.lines.backend import Backend
from sglang_coserve.lines.background import run_module
from sglang_coserve.lines.fair_slots import FairSlots, JobShare

_MOST: Final = 2
"""So that a small file does not wait for a large one."""

_MODULE: Final = "sglang_coserve.jsonl.check_file"


class FileProcesses:
    """Runs them in turns; owners get equal shares of the bytes that are read.

    Cancelling a call ends its process.
    """

    def __init__(self) -> None:
        self._turns = FairSlots(_MOST, max_bytes=1)

    async def validate(
        self, batch: JobRecord, path: Path, limits: BatchLimits, backend: Backend, order: Path
    ) -> Validated | Failed:
        """Return a summary of the input, or the errors for which ``backend`` cannot use it.

        The order of the lines of a good one is then in ``order``. An engine orders by itself what
        it has at once, but of a long file that is only a few hundred lines at a time.

        Raises:
            StorageError: the check itself failed; the file may be good.
        """
        wanted = CheckLimits(
            limits.max_lines,
            backend.limits.max_bytes,
            limits.max_reported_errors,
            backend.limits.context_tokens,
            limits.max_in_flight,
            backend.model_names,
        )
        async with self._turn(batch, await asyncio.to_thread(_size_bytes, path)):
            arguments = (str(path), batch.endpoint, json.dumps(asdict(wanted)), str(order))
            report = await run_module(f"checking {path}", _MODULE, *arguments)
        if report["faults"]:
            return Failed(tuple(LineFault(**fault) for fault in report["faults"]))
        return Validated(report["requests"], report["estimated_tokens"], report["model"])

    async def custom_id(self, batch: JobRecord, path: Path, offset: int, size_bytes: int) -> str:
        """Return the id of the line of ``size_bytes`` at ``offset``, which has been checked.

        Raises:
            StorageError: the line is not what it was then.
        """
        async with self._turn(batch, size_bytes):
            what = f"reading the line at byte {offset} of {path}"
            return str(await run_module(what, _MODULE, str(path), batch.endpoint, str(offset)))

    @asynccontextmanager
    async def _turn(self, batch: JobRecord, size_bytes: int) -> AsyncGenerator[None]:
        share = JobShare(batch.owner, batch.priority, batch.weight, batch.expires_at_s)
        self._turns.join(share)
        try:
            await self._turns.acquire(share, 0, size_bytes)
            try:
                yield
            finally:
                self._turns.release(share, 0, size_bytes, size_bytes)
        finally:
            self._turns.leave(share)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # The process will say what is wrong with it.
