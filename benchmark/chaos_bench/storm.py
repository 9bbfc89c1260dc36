"""Requests that no client should send: a corpus of malformed ones, huge, endless, abandoned."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import httpx
import orjson

from chaos_bench.answers import COMPLETIONS, completion_body
from chaos_bench.figures import Observation

_TIMEOUT_S: Final = 30.0
_PAUSE_S: Final = 0.05
_MIB: Final = 1 << 20
_LARGE_BYTES: Final = 15 * _MIB
_ROUTES: Final = (
    *("/v1/chat/completions", COMPLETIONS, "/v1/embeddings", "/v1/responses", "/generate"),
    *("/v1/files", "/v1/batches", "/v1/batches/x/cancel", "/v1/score", "/v1/tokenize"),
)
_STREAMS_ABANDONED: Final = 4


class HostileRequest(Protocol):
    """One request of the corpus."""

    @property
    def path(self) -> str:
        """Where it is sent."""
        ...

    @property
    def content(self) -> bytes:
        """Its body."""
        ...


class Storm:
    """Sends one thing after the other until it is stopped."""

    def __init__(self, base_url: str, corpus: Sequence[HostileRequest], seed: int) -> None:
        self.seen: list[Observation] = []
        self._corpus = corpus
        self._rng = random.Random(seed)
        self._client = httpx.Client(base_url=base_url, timeout=_TIMEOUT_S, trust_env=False)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="storm", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, after what is under way."""
        self._stop.set()
        self._thread.join(_TIMEOUT_S * 2)
        self._client.close()

    def _run(self) -> None:
        kinds: list[tuple[str, Callable[[], httpx.Response | None]]] = [
            ("random bytes", self._random_bytes),
            ("large body", self._large_body),
            ("large line", self._large_line),
            ("endless form", self._endless_form),
            ("abandoned stream", self._abandoned_streams),
            ("unknown ids", self._unknown_ids),
        ]
        if self._corpus:
            # Most of what is sent, since it is most of what there is.
            kinds += [("corpus", self._corpus_request)] * len(kinds)
        while not self._stop.is_set():
            name, send = self._rng.choice(kinds)
            start_s = time.monotonic()
            status, detail = 0, ""
            try:
                response = send()
                if response is not None:
                    status, detail = response.status_code, response.text[:300]
                else:
                    status = 200  # Sent without waiting for an answer.
            except (httpx.HTTPError, OSError) as error:
                detail = f"{type(error).__name__}: {error}"
            self.seen.append(Observation(name, start_s, time.monotonic(), status, detail=detail))
            self._stop.wait(_PAUSE_S)

    def _corpus_request(self) -> httpx.Response:
        request = self._rng.choice(self._corpus)
        return self._client.post(request.path, content=request.content, headers=_JSON)

    def _random_bytes(self) -> httpx.Response:
        content = self._rng.randbytes(self._rng.choice((0, 1, 100, 10_000)))
        kind = self._rng.choice(("application/json", "multipart/form-data; boundary=x", "", "text"))
        path = self._rng.choice(_ROUTES)
        return self._client.post(path, content=content, headers={"content-type": kind})

    def _large_body(self) -> httpx.Response:
        prompt: Any = self._rng.choice((["a b "] * 100_000, "word " * (_LARGE_BYTES // 5)))
        path, body = self._rng.choice(
            (
                (COMPLETIONS, completion_body(prompt, 4)),
                ("/generate", {"text": prompt, "sampling_params": {"max_new_tokens": 4}}),
                (
                    "/v1/chat/completions",
                    {"model": "default", "messages": [{"role": "user", "content": str(prompt)}]},
                ),
            )
        )
        return self._client.post(path, content=orjson.dumps(body), headers=_JSON)

    def _large_line(self) -> httpx.Response | None:
        body = completion_body("word " * (_LARGE_BYTES // 5), 4)
        line = {"custom_id": "large", "method": "POST", "url": COMPLETIONS, "body": body}
        headers = {"authorization": f"Bearer storm-{self._rng.randrange(4)}"}
        response = self._client.post(
            "/v1/files",
            data={"purpose": "batch"},
            files={"file": ("large.jsonl", orjson.dumps(line))},
            headers=headers,
        )
        if not response.is_success:
            return response
        batch = {
            "input_file_id": orjson.loads(response.content)["id"],
            "endpoint": COMPLETIONS,
            "completion_window": "24h",
        }
        return self._client.post("/v1/batches", json=batch, headers=headers)

    def _endless_form(self) -> httpx.Response | None:
        def parts() -> Any:
            for number in range(20_000):
                if self._stop.is_set():
                    return
                yield f'--x\r\nContent-Disposition: form-data; name="f{number}"\r\n\r\n{number}\r\n'

        content = (part.encode() for part in parts())
        kind = {"content-type": "multipart/form-data; boundary=x"}
        return self._client.post("/v1/files", content=content, headers=kind)

    def _abandoned_streams(self) -> None:
        for _ in range(_STREAMS_ABANDONED):
            body = completion_body("the old mill", 500, stream=True)
            with self._client.stream("POST", COMPLETIONS, json=body) as response:
                next(response.iter_bytes(), None)

    def _unknown_ids(self) -> httpx.Response:
        name = self._rng.choice(
            ("x", "batch_" + "0" * 24, "file-" + "f" * 24, "%2e%2e%2f", "a" * 99)
        )
        method, path = self._rng.choice(
            (
                ("GET", f"/v1/batches/{name}"),
                ("POST", f"/v1/batches/{name}/cancel"),
                ("POST", f"/v1/batches/{name}/resume"),
                ("GET", f"/v1/files/{name}/content"),
                ("DELETE", f"/v1/files/{name}"),
                ("GET", "/v1/files?limit=10000"),
                ("GET", "/v1/batches?limit=100"),
            )
        )
        return self._client.request(method, path, headers={"range": "bytes=5-2"})


_JSON: Final = {"content-type": "application/json"}
