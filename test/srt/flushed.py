"""Flushing an engine's cache in tests.

A request's last tokens come while its last batch, or one that was begun with it in, is still
under way. SGLang then refuses to flush, unless it is told how long it may wait for that.
"""

from __future__ import annotations

from typing import Any

IDLE_TIMEOUT_S = 30


def is_flushed(engine: Any) -> bool:
    """Empty the cache; False means that requests were left behind."""
    flush = engine.tokenizer_manager.flush_cache(timeout_s=IDLE_TIMEOUT_S)
    return bool(engine.loop.run_until_complete(flush).success)
