"""Work on files in a process of its own, which leaves the server's interpreter lock alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from typing import Any, BinaryIO, Final

import orjson

from sglang_coserve.errors import StorageError

__all__ = ["run_module"]

_POLL_S: Final = 0.01
"""A process takes ten times as long to start."""


async def run_module(
    what: str, module: str, *arguments: str, source: BinaryIO | None = None
) -> Any:
    """Return the JSON that ``python -m module`` prints. Cancelling the call ends the process.

    ``source`` is its standard input, nothing for None.

    Raises:
        StorageError: it failed at ``what``.
    """
    command = (sys.executable, "-m", module, *arguments)
    try:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaint:
            status = await _run(command, source, output, complaint)
            output.seek(0)
            complaint.seek(0)
            found, said = output.read(), complaint.read()
    except OSError as error:
        raise StorageError(f"{what} could not begin: {error.strerror}") from error
    if status:
        lines = said.decode(errors="replace").strip().splitlines() or ["no message"]
        raise StorageError(f"{what} ended with {status}: {lines[-1]}")
    return orjson.loads(found)


async def _run(
    command: tuple[str, ...], source: BinaryIO | None, output: Any, complaint: Any
) -> int:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if source is None else source,
            stdout=output,
            stderr=complaint,
            # An interrupt from the terminal is for the server to handle.
            start_new_session=True,
        )

    # Not with asyncio's processes: uvloop forks, which stops the event loop for 40 ms for each
    # GiB that the server has in memory. A thread starts one in half a millisecond.
    starting = asyncio.get_running_loop().run_in_executor(None, start)
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:
        # A second cancellation does not wait, and the process is to end all the same.
        starting.add_done_callback(_end)
        await asyncio.wait({starting})
        raise
    try:
        while (status := process.poll()) is None:
            await asyncio.sleep(_POLL_S)
        return status
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()


def _end(starting: asyncio.Future[subprocess.Popen[bytes]]) -> None:
    """End a process that nobody waits for any more."""
    if starting.exception() is None:
        process = starting.result()
        process.kill()
        process.wait()
