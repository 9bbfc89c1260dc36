"""Work on files in a process of its own, which leaves the server's interpreter lock alone."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from typing import Any

import orjson

from sglang_coserve.batch.errors import StorageError

__all__ = ["run_module"]


async def run_module(what: str, module: str, *arguments: str) -> Any:
    """Return the JSON that ``python -m module`` prints. Cancelling the call ends the process.

    Raises:
        StorageError: it failed at ``what``.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        # An interrupt from the terminal is for the server to handle.
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
        raise StorageError(f"{what} ended with {process.returncode}: {lines[-1]}")
    return orjson.loads(output)
