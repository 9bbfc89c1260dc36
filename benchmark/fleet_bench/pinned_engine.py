"""Engines on a core each, gateways before them, and batches over those."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import openai

from common.batch_server import upload
from common.input_file import COMPLETIONS
from sglang_coserve.local_server import LocalServer

__all__ = ["begin_batch", "gateway", "pinned_engine"]

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


def gateway(data: Path, engine_urls: Sequence[str]) -> LocalServer:
    """Return a gateway that is not started; it keeps everything in ``data``."""
    engines = [flag for url in engine_urls for flag in ("--engine", url)]
    return LocalServer(
        ["--coserve-data-dir", str(data), *engines],
        log_path=data.with_suffix(".log"),
        module="sglang_coserve.fleet",
        ready_timeout_s=_READY_S,
        extra_env={"COSERVE_ENGINE_ADMIN_KEY": _KEY},
    )


def begin_batch(client: openai.OpenAI, source: Path) -> str:
    """Upload a file and begin a batch of it with time enough; return the batch's id."""
    # The type knows OpenAI's one window only.
    window: Any = "30d"
    return client.batches.create(
        input_file_id=upload(client, source), endpoint=COMPLETIONS, completion_window=window
    ).id
