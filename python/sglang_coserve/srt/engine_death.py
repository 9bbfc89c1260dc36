"""Tells whoever wants to know that the engine has ended by itself."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["fatal_signals_told_to", "is_stop_asked"]


def is_stop_asked(tokenizer_manager: Any) -> bool:
    """Tell whether somebody has asked the server to stop: its processes then end on purpose.

    A terminal's Ctrl-C, and a service manager's SIGTERM, may reach all of them at once.
    """
    if tokenizer_manager.gracefully_exit:
        return True
    # Uvicorn handles Ctrl-C with a method of its server.
    server = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return bool(getattr(server, "should_exit", False))


@contextmanager
def fatal_signals_told_to(path: Path) -> Generator[None]:
    """Within it, where the process is when it dies of SIGSEGV or the like is written to ``path``.

    The next start logs it. Python's handler writes to one file only, so not to standard error.

    Raises:
        OSError: the file cannot be made.
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
