"""Checks an input file in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sglang_coserve.batch.limits import BatchLimits
from sglang_coserve.batch.record import LineFault
from sglang_coserve.batch.state import Failed, Validated
from sglang_coserve.lines.helper_process import run_module

__all__ = ["validate"]

_MODULE: Final = "sglang_coserve.jsonl.check_file"


async def validate(path: Path, endpoint: str, limits: BatchLimits) -> Validated | Failed:
    """Return a summary of the file, or the errors for which it cannot be used.

    Cancelling the call ends the process.

    Raises:
        StorageError: the check itself failed; the file may be good.
    """
    report = await run_module(
        f"checking {path}",
        *(_MODULE, str(path), "--endpoint", endpoint),
        *("--max-lines", str(limits.max_lines)),
        *("--max-line-bytes", str(limits.max_line_bytes)),
        *("--max-faults", str(limits.max_reported_errors)),
    )
    if report["faults"]:
        return Failed(tuple(LineFault(**fault) for fault in report["faults"]))
    return Validated(report["requests"], report["estimated_tokens"])
