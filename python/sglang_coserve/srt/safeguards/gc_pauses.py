"""Keeps Python's garbage collector from stopping the server for long.

A full collection visits every live object, hundreds of thousands of them
after SGLang's imports: the process stops for a third of a second, longer than many a
TTFT target. SGLang has a request that makes all its processes exclude the objects of the
start-up from later collections (``gc.freeze``), but sends it only when an operator asks for
it.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any, Final

__all__ = ["freeze_imports", "freeze_start_up_objects"]

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
