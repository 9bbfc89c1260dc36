"""Ends a process when one of its children has ended."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from typing import Final

__all__ = ["end_with_children"]

_INTERVAL_S: Final = 1.0
"""The interval at which SGLang checks the processes of a server."""

logger = logging.getLogger(__name__)


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
