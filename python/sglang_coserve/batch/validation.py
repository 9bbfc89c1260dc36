"""Checks an input file in a process of its own."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from typing import Final

import orjson

from sglang_coserve.batch.errors import StorageError
from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.record import LineFault
from sglang_coserve.batch.state import Failed, Validated

__all__ = ["validate"]

_MODULE: Final = "sglang_coserve.jsonl.check_file"


async def validate(path: Path, endpoint: str, limits: BatchLimits) -> Validated | Failed:
    """Return what the file holds, or why it cannot be used.

    Cancelling the call ends the process.

    Raises:
        StorageError: the check itself failed; the file may be good.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", _MODULE, str(path)),
        *("--endpoint", endpoint),
        *("--max-lines", str(limits.max_lines)),
        *("--max-line-bytes", str(limits.max_line_bytes)),
        *("--max-faults", str(limits.max_reported_errors)),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        # An interrupt from the terminal is for the server to handle, not for the check.
        start_new_session=True,
    )
    try:
        output, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = complaint.decode(errors="replace").strip().splitlines() or ["no message"]
        raise StorageError(f"checking {path} ended with {process.returncode}: {lines[-1]}")
    report = orjson.loads(output)
    if report["faults"]:
        return Failed(tuple(LineFault(**fault) for fault in report["faults"]))
    return Validated(report["requests"], report["estimated_tokens"])
