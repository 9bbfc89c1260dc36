"""Scripts in a process of their own, for what belongs to a process: metrics, say."""

from __future__ import annotations

import io
import multiprocessing
import traceback
from contextlib import redirect_stdout
from typing import Any

from forked_processes import Forked

TIMEOUT_S = 300


def printed_by(script: str) -> list[str]:
    """Return the lines that a Python script prints, which may find SGLang imported."""
    ours, theirs = multiprocessing.Pipe()
    process = Forked(target=run, args=(script, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(TIMEOUT_S), "it does not end"
        printed, error = ours.recv()
    finally:
        process.kill()
        process.join()
    assert not error, error
    return str(printed).splitlines()


def run(script: str, connection: Any) -> None:
    error = ""
    with redirect_stdout(io.StringIO()) as printed:
        try:
            exec(script, {"__name__": "__main__"})
        except BaseException:
            error = traceback.format_exc()
    connection.send((printed.getvalue(), error))
