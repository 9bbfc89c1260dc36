"""The processes of a server: what ends them, and what stops them for a while.

- A process ends when one of its children has ended.
- A crash of the engine is told from a stop that was asked for, and fatal signals are recorded.
- The garbage collector does not look through the imports. A full collection visits every live
  object, hundreds of thousands of them after SGLang's imports: the process stops for a third of a
  second, longer than many a TTFT target. SGLang can exclude them (``gc.freeze``), but does so
  only when an operator asks.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = 1.0
"""The interval at which SGLang checks the processes of a server."""


def end_with_children() -> None:
    """End this process with status 1 soon after any of its child processes has ended, and when
    they cannot be watched.

    Applies to children started from now on.
    """
    threading.Thread(target=_watch_to_the_end, name="coserve-child-watch", daemon=True).start()


def _watch_to_the_end() -> None:
    try:
        _watch()
    except Exception:
        logger.exception("the processes of the server cannot be watched: it ends")
        os._exit(1)


def _watch() -> None:
    seen: dict[int | None, str] = {}
    while True:
        alive = {child.pid: child.name for child in multiprocessing.active_children()}
        for pid in seen.keys() - alive.keys():
            logger.error("%s (pid %s) has ended: its siblings end with it", seen[pid], pid)
            os._exit(1)
        seen = alive
        time.sleep(_INTERVAL_S)


def is_stop_asked(tokenizer_manager: Any) -> bool:
    """Return whether the server was asked to stop, so that its processes end on purpose.

    A terminal's Ctrl-C or a service manager's SIGTERM may reach all of them at once.
    """
    if tokenizer_manager.gracefully_exit:
        return True
    return bool(getattr(uvicorn_server(), "should_exit", False))


def expect_end_of_processes(tokenizer_manager: Any) -> None:
    """Let the server's processes end, which SGLang's watchdog would report as a crash."""
    if (watchdog := tokenizer_manager._subprocess_watchdog) is not None:
        watchdog.stop()


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


_TIMEOUT_S: Final = 30.0

_YOUNGER_COLLECTIONS: Final = 10
"""Python's own number of them before a full one; ``launch_server`` starts with more."""


def freeze_imports() -> None:
    """Freeze all live objects of this process, and look through all later ones as Python does.

    To be called in every process before it serves requests. The collection takes 0.4 s, which
    makes the next one, when the server is warm, short.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _YOUNGER_COLLECTIONS)


def freeze_start_up_objects(manager: Any) -> None:
    """Freeze all live objects of the tokenizer manager, the schedulers and the detokenizer.

    To be called once when the server is warm, from another thread than the manager's.
    Before its first request the manager runs no event loop and cannot forward
    the request; then only its own process is frozen.
    """
    gc.collect()
    if manager.event_loop is None:
        gc.freeze()
        return
    asyncio.run_coroutine_threadsafe(manager.freeze_gc(), manager.event_loop).result(_TIMEOUT_S)
