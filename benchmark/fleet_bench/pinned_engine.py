"""Engines on a core each, and gateways before them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from common.batch_server import BatchServer
from sglang_coserve.local_server import LocalServer

__all__ = ["gateway", "pinned_engine"]

_KEY: Final = "the engines' admin key"
_READY_S: Final = 300.0


@contextmanager
def pinned_engine(model_path: str, core: int, log_path: Path, *flags: str) -> Iterator[LocalServer]:
    """Run an engine, all of its processes on one core."""
    server = LocalServer(
        [
            *("--model-path", model_path, "--dtype", "float32", "--log-level", "warning"),
            *("--admin-api-key", _KEY, *flags),
        ],
        log_path=log_path,
        ready_timeout_s=_READY_S,
        extra_env={"OMP_NUM_THREADS": "1"},
    )
    cores = os.sched_getaffinity(0)
    # Processes have the affinity of the one that starts them.
    os.sched_setaffinity(0, {core})
    try:
        server.start()
        os.sched_setaffinity(0, cores)
        yield server
    finally:
        os.sched_setaffinity(0, cores)
        server.stop()


def gateway(data: Path, engine_urls: Sequence[str]) -> BatchServer:
    """Return a gateway that is not started; it keeps everything in ``data``."""
    return BatchServer(
        [flag for url in engine_urls for flag in ("--engine", url)],
        data,
        data.with_suffix(".log"),
        _READY_S,
        module="sglang_coserve.fleet",
        extra_env={"COSERVE_ENGINE_ADMIN_KEY": _KEY},
    )
