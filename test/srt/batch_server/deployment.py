"""A real server with a Batch API that can be killed and started again, and calls to it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
from openai.types import Batch

from batch import route_calls
from batch.scenarios import SECRET
from calls import call, client_of
from forked_processes import ForkedServer
from sglang_coserve.local_server import LocalServer
from waiting import GIVE_UP_S

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES = "/v1/responses"
START_S = 300
"""Of replicas, whose controller is one more process that imports SGLang before they do."""

API_KEY = "secret"
ADMIN_KEY = "admin secret"


def line(custom_id: str, max_tokens: Any = 8, url: str = COMPLETIONS, **extra: Any) -> str:
    message = {"role": "user", "content": custom_id}
    prompts: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": f"The {custom_id} of the old mill", "max_tokens": max_tokens},
        CHAT: {"messages": [message], "max_tokens": max_tokens},
        RESPONSES: {"input": [message], "max_output_tokens": max_tokens},
    }
    body = {"model": "small", "temperature": 0, "ignore_eos": True, **prompts[url], **extra}
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(fields) + "\n"


def lines(count: int, max_tokens: int = 8, url: str = COMPLETIONS, **extra: Any) -> bytes:
    return "".join(line(f"id-{n}", max_tokens, url, **extra) for n in range(count)).encode()


class Deployment(LocalServer):
    """A server on one directory."""

    def __init__(self, model: Path, directory: Path, *flags: str) -> None:
        self.data = directory / "data"
        self.log = directory / "server.log"
        self.environment = {"COSERVE_WEBHOOK_SECRET": SECRET}
        super().__init__(
            [
                *("--model-path", str(model), "--dtype", "float32", "--api-key", API_KEY),
                *("--admin-api-key", ADMIN_KEY, "--served-model-name", "small"),
                *("--coserve-data-dir", str(self.data), *flags),
            ],
            log_path=self.log,
            ready_timeout_s=START_S,
        )

    def start(self) -> None:
        self._env = {**os.environ, **self.environment}
        super().start()

    @contextmanager
    def slowly(self, step_s: float = 0.1) -> Iterator[None]:
        """Let each step last ``step_s`` or longer: with 0.1, a line of 300 tokens runs for 30 s.

        A test that stops lines in the middle has this time to do so, on any machine.
        """
        assert isinstance(self._process, ForkedServer)
        slow = self.log.with_name("slow")
        new = slow.with_suffix(".new")
        new.write_text(str(step_s))
        new.replace(slow)
        try:
            yield
        finally:
            slow.unlink()

    def client(self, api_key: str = API_KEY) -> openai.OpenAI:
        return client_of(self, api_key)

    def ask(
        self, method: str, path: str, key: str | None = ADMIN_KEY, body: Any = None
    ) -> httpx2.Response:
        """Send JSON, or nothing, and return whatever is answered."""
        return call(self, method, path, key, json=body)

    def flush(self) -> None:
        """Have it forget its cache, once nothing runs."""
        self.ask("POST", f"/flush_cache?timeout={GIVE_UP_S}").raise_for_status()

    def status(self) -> dict[str, Any]:
        answer = self.ask("GET", "/coserve/status", API_KEY)
        return answer.raise_for_status().json()


def create(
    client: openai.OpenAI,
    content: bytes,
    window: Any = "24h",
    endpoint: Any = COMPLETIONS,
    **options: Any,
) -> Batch:
    """Begin a batch; ``options`` are those of ``coserve``."""
    return route_calls.create(client, content, window, endpoint, extra_body={"coserve": options})


def extra_of(batch: Batch) -> dict[str, Any]:
    """What the object has beyond OpenAI's fields."""
    return batch.to_dict()["coserve"]
