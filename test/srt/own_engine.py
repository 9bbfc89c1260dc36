"""An engine in the test's process: how it is started, asked and looked at."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from forked_processes import Forked

IDLE_TIMEOUT_S = 30
"""A request's last tokens come while its last batch, or one that was begun with it in, is still
under way. SGLang then refuses to flush, unless it is told how long it may wait for that."""


@contextmanager
def own_engine(
    model: Path,
    coserve: Mapping[str, Any],
    environment: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> Iterator[Any]:
    """Run an engine with these settings of co-serving and of SGLang, its memory checked."""
    from sglang_coserve.config import CoserveConfig
    from sglang_coserve.srt.engine import CoserveEngine

    with pytest.MonkeyPatch.context() as variables:
        for name, value in {
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            **environment,
        }.items():
            variables.setenv(name, value)
        # SGLang's own way starts each of its processes anew.
        variables.setattr(multiprocessing, "Process", Forked)
        before = multiprocessing.active_children()
        running = CoserveEngine(
            model_path=str(model),
            dtype="float32",
            coserve_config=CoserveConfig(**coserve),
            **settings,
        )
    started = set(multiprocessing.active_children()).difference(before)
    try:
        yield running
    finally:
        running.shutdown()
        # It ends its process's children, which they are not.
        for process in started:
            process.kill()
            process.join()


def params(max_new_tokens: int, *, offline: bool) -> dict[str, Any]:
    """Sampling parameters: greedy, and no EOS."""
    mark = {"custom_params": {"coserve_class": "offline"}} if offline else {}
    return {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True, **mark}


def state(engine: Any) -> dict[str, Any]:
    """What the scheduler says of itself, as in ``/coserve/status``."""
    internal = engine.loop.run_until_complete(engine.tokenizer_manager.get_internal_state())[0]
    return internal["coserve"]


def is_flushed(engine: Any) -> bool:
    """Empty the cache; False means that requests were left behind."""
    flush = engine.tokenizer_manager.flush_cache(timeout_s=IDLE_TIMEOUT_S)
    return bool(engine.loop.run_until_complete(flush).success)
