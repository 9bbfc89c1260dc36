"""An engine with a backend, and lines for it."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang_coserve.lines.backend import LineRequest, LineResult

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"

TIMEOUT_S = 120
"""For a whole test; nothing that passes comes near it."""

PROMPT = "The ferry left the harbour before the rain."
LONG_TEXT = PROMPT * 5000
MESSAGES = [{"role": "user", "content": "Who mended the lamp?"}]
GREEDY = {"model": "small", "temperature": 0, "ignore_eos": True}
COMPLETION = {**GREEDY, "prompt": PROMPT, "max_tokens": 70, "return_token_ids": True}
LONG = {**GREEDY, "prompt": PROMPT, "max_tokens": 900}


class Served:
    """An engine with a backend, driven from outside of its event loop."""

    def __init__(self, engine: Any) -> None:
        from sglang_coserve.srt.batch_backend import BatchBackend

        self.engine = engine
        self.manager = engine.tokenizer_manager
        self.backend = BatchBackend(
            engine.tokenizer_manager, engine.template_manager, fingerprint="small"
        )

    def do(self, coroutine: Any) -> Any:
        return self.engine.loop.run_until_complete(asyncio.wait_for(coroutine, TIMEOUT_S))

    def run(
        self,
        endpoint: str,
        body: dict[str, Any],
        on_tokens: Callable[[Sequence[int]], None] = lambda _: None,
        generated: Sequence[int] = (),
    ) -> Any:
        """The coroutine that serves a line."""
        line = LineRequest(
            batch_id="batch_1",
            line=1,
            endpoint=endpoint,
            body=copy.deepcopy(body),  # The backend may change it.
            generated=tuple(generated),
            deadline_s=time.time() + 3600,
        )
        return self.backend.run(line, on_tokens)

    def serve(
        self, endpoint: str, body: dict[str, Any], generated: Sequence[int] = ()
    ) -> tuple[LineResult, list[int]]:
        """Serve a line; return its result and the tokens that were told of."""
        told: list[int] = []
        result = self.do(self.run(endpoint, body, told.extend, generated))
        return result, told

    def answer(
        self, endpoint: str, body: dict[str, Any], generated: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Serve a line well; return the response without what differs from run to run."""
        result, _ = self.serve(endpoint, body, generated)
        assert (result.status_code, result.is_retryable) == (200, False), result.body
        return comparable(result.body)

    async def counts(self) -> dict[str, dict[str, int]]:
        (state,) = await self.manager.get_internal_state()
        return state["coserve"]

    async def until(self, is_reached: Callable[[dict[str, dict[str, int]]], bool]) -> None:
        while not is_reached(await self.counts()):
            await asyncio.sleep(0.01)

    def assert_nothing_left(self) -> None:
        """No request anywhere, and by the engine's own account no memory in use."""
        # The end of an aborted request is still on its way when the engine is idle.
        self.do(self.until(lambda counts: is_idle(counts) and not self.manager.rid_to_state))
        # Refused while the engine has anything; what was aborted leaves it in the next pass.
        assert self.do(self.manager.flush_cache(timeout_s=30)).success


def is_idle(counts: dict[str, dict[str, int]]) -> bool:
    return not any(
        counts[name][state]
        for name in ("online", "offline")
        for state in ("waiting", "running", "prefilling")
        if state in counts[name]
    )


def comparable(body: Any) -> Any:
    """A response without ids and times."""
    if isinstance(body, dict):
        left_out = ("id", "created", "created_at")
        return {key: comparable(value) for key, value in body.items() if key not in left_out}
    return [comparable(item) for item in body] if isinstance(body, list) else body
