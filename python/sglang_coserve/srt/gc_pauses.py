"""Keeps Python's garbage collector from stopping the server for long.

A full collection walks every object that is alive, hundreds of thousands of them
after SGLang's imports: a third of a second in which a process answers nobody,
more than many a TTFT target. SGLang has a request by which all its processes
leave the objects of the start-up out of later collections, but sends it only when
an operator asks for it.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any, Final

__all__ = ["freeze_imports", "freeze_start_up_objects"]

_TIMEOUT_S: Final = 30.0


def freeze_imports() -> None:
    """Freeze what lives now in this process; to be called before it answers anybody.

    The collection takes 0.4 s, and the next one, when the server is warm, little.
    """
    gc.collect()
    gc.freeze()


def freeze_start_up_objects(manager: Any) -> None:
    """Freeze what lives now in the tokenizer manager's process, its schedulers and detokenizer.

    To be called once, from another thread than the manager's, when the server is
    warm. Before its first request the manager runs no event loop and cannot pass
    the request on; then its own process alone is frozen.
    """
    gc.collect()
    if manager.event_loop is None:
        gc.freeze()
        return
    asyncio.run_coroutine_threadsafe(manager.freeze_gc(), manager.event_loop).result(_TIMEOUT_S)
