"""``python -m fleet_bench.fake_engine``: an engine that computes nothing, or a server of its own.

Serves lines as ``/coserve/lines`` does, each for ``--line-s`` seconds, with tokens meanwhile.
With ``--coserve-data-dir`` it has a Batch API itself, as a single server: what a gateway costs is
to be compared with that.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI

from sglang_coserve.batch import BackendLoad, BatchLimits, BatchService, LineRequest, LineResult
from sglang_coserve.batch.routes import add_batch_routes, set_admin_key, set_service
from sglang_coserve.core.engine_load import ClassLoad, EngineLoad, KvFormat, Versions
from sglang_coserve.http_lines import LOAD_PATH, LineServer, add_line_routes, set_line_server
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.backend import Backend

__all__ = ["ADMIN_KEY", "FakeBackend"]

ADMIN_KEY: Final = "the fake engines' admin key"

_PROMPT_TOKENS, _OUTPUT_TOKENS, _PARTS = 64, 32, 2
_TEXT: Final = "token " * _OUTPUT_TOKENS
_PART: Final = tuple(range(_OUTPUT_TOKENS // _PARTS))


class FakeBackend(Backend):
    """See ``Backend``: answers every line after ``line_s`` with the same tokens."""

    model = "fake"
    endpoints = frozenset({"/v1/completions"})
    limits = BodyLimits()

    def __init__(self, line_s: float) -> None:
        self._line_s = line_s
        self.num_running = 0

    def load(self) -> BackendLoad:
        """See ``Backend``."""
        return BackendLoad(None)

    async def run(
        self, request: LineRequest, on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        """See ``Backend``."""
        self.num_running += 1
        try:
            for part in range(_PARTS):
                await asyncio.sleep(self._line_s / _PARTS)
                if part < _PARTS - 1:
                    on_tokens(_PART)
        finally:
            self.num_running -= 1
        usage = {
            "prompt_tokens": _PROMPT_TOKENS,
            "completion_tokens": _OUTPUT_TOKENS,
            "total_tokens": _PROMPT_TOKENS + _OUTPUT_TOKENS,
        }
        choice = {"index": 0, "text": _TEXT, "logprobs": None, "finish_reason": "length"}
        body = {"id": f"cmpl-{request.line}", "object": "text_completion", "choices": [choice]}
        return LineResult(200, str(request.line), {**body, "model": "fake", "usage": usage})


def _engine_load(backend: FakeBackend) -> EngineLoad:
    nothing = ClassLoad(running=0, waiting=0, outstanding_tokens=0)
    return EngineLoad(
        online=nothing,
        offline=ClassLoad(running=backend.num_running, waiting=0, outstanding_tokens=0),
        kv_tokens=1,
        online_kv_tokens=0,
        reclaimable_kv_tokens=0,
        reclaim_s=None,
        headroom_tokens_per_s=None,
        max_lines=1,
        replicas=1,
        age_s=0.0,
        is_draining=False,
        model_name="fake",
        model=backend.model,
        kv_fingerprint="fake",
        kv_format=KvFormat(
            dtype="fake",
            kv_cache_dtype="fake",
            quantization=None,
            tp_size=1,
            pp_size=1,
            page_size=1,
        ),
        versions=Versions(sglang_coserve="fake", sglang="fake"),
    )


def main(argv: Sequence[str]) -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--line-s", type=float, required=True)
    parser.add_argument("--coserve-data-dir", type=Path)
    parser.add_argument("--max-lines", type=int, default=1)
    parser.add_argument("--max-in-flight", type=int, default=512)
    options = parser.parse_args(argv)
    backend = FakeBackend(options.line_s)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        set_line_server(app, LineServer(backend))
        if options.coserve_data_dir is None:
            yield
            return
        limits = BatchLimits(
            max_lines=options.max_lines,
            max_upload_bytes=1 << 40,
            max_in_flight=options.max_in_flight,
        )
        async with await BatchService.open(options.coserve_data_dir, backend, limits) as service:
            set_service(app, service)
            yield

    async def load() -> EngineLoad:
        return _engine_load(backend)

    async def health() -> dict[str, str]:
        return {}

    app = FastAPI(lifespan=lifespan)
    add_line_routes(app)
    add_batch_routes(app)
    set_admin_key(app, ADMIN_KEY)
    app.add_api_route(LOAD_PATH, load)
    app.add_api_route("/health", health)
    uvicorn.run(app, host=options.host, port=options.port, log_level="error")


if __name__ == "__main__":
    main(sys.argv[1:])
