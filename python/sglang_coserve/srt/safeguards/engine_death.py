"""Distinguishes a crash of the engine from a requested stop, and records fatal signals."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["fatal_signals_recorded_in", "is_stop_asked", "uvicorn_server"]


def is_stop_asked(tokenizer_manager: Any) -> bool:
    """Return whether the server was asked to stop, so that its processes end on purpose.

    A terminal's Ctrl-C or a service manager's SIGTERM may reach all of them at once.
    """
    if tokenizer_manager.gracefully_exit:
        return True
    return bool(getattr(uvicorn_server(), "should_exit", False))


def uvicorn_server() -> Any:
    """Return Uvicorn's server, a method of which handles Ctrl-C; None where something else does."""
    return getattr(signal.getsignal(signal.SIGINT), "__self__", None)


@contextmanager
def fatal_signals_recorded_in(path: Path) -> Generator[None]:
    """Write a traceback to ``path`` if the process dies of SIGSEGV or the like in this context.

    The next start logs it. Python's fault handler writes to one file only, so nothing goes to
    standard error.

    Raises:
        OSError: the file cannot be created.
    """
    was_enabled = faulthandler.is_enabled()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        faulthandler.enable(fd)
        yield
    finally:
        faulthandler.disable()
        if was_enabled:
            faulthandler.enable()
        os.close(fd)
