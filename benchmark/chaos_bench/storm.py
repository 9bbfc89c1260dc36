"""Requests that no client should send: a corpus of malformed ones, huge, endless, abandoned."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx2
import orjson

from chaos_bench.answers import CHAT, COMPLETIONS, completion_body
from chaos_bench.figures import Observation

_TIMEOUT_S: Final = 30.0
_PAUSE_S: Final = 0.05
_MIB: Final = 1 << 20
_LARGE_BYTES: Final = 15 * _MIB
_ROUTES: Final = (
    *(CHAT, COMPLETIONS, "/v1/embeddings", "/v1/responses", "/generate"),
    *("/v1/files", "/v1/batches", "/v1/batches/x/cancel", "/v1/score", "/v1/tokenize"),
)
_STREAMS_ABANDONED: Final = 4
_JSON: Final = {"content-type": "application/json"}


def storm(
    base_url: str, corpus: Sequence[tuple[str, bytes]], seed: int, stop: Path
) -> list[Observation]:
    """Send one thing after the other until the file ``stop`` is there; return what was seen.

    Of the corpus, which has paths and bodies, most: it is most of what there is.
    """
    seen = []
    with httpx2.Client(base_url=base_url, timeout=_TIMEOUT_S, trust_env=False) as client:
        hostile = _Hostile(client, corpus, random.Random(seed))
        while not stop.exists():
            name, send = hostile.drawn()
            start_s = time.monotonic()
            status, detail = 0, ""
            try:
                response = send()
                # Those that are abandoned have none.
                status, detail = (
                    (200, "") if response is None else (response.status_code, response.text[:300])
                )
            except (httpx2.HTTPError, OSError) as error:
                detail = f"{type(error).__name__}: {error}"
            seen.append(Observation(name, start_s, time.monotonic(), status, detail=detail))
            time.sleep(_PAUSE_S)
    return seen


class _Hostile:
    """What is sent, each at random."""

    def __init__(
        self, client: httpx2.Client, corpus: Sequence[tuple[str, bytes]], rng: random.Random
    ) -> None:
        self._client = client
        self._corpus = corpus
        self._rng = rng

    def drawn(self) -> tuple[str, Callable[[], httpx2.Response | None]]:
        """Return the name of what to send next, and what sends it."""
        kinds: list[tuple[str, Callable[[], httpx2.Response | None]]] = [
            ("random bytes", self._random_bytes),
            ("large body", self._large_body),
            ("large line", self._large_line),
            ("endless form", self._endless_form),
            ("abandoned stream", self._abandoned_streams),
            ("unknown ids", self._unknown_ids),
        ]
        return self._rng.choice([*kinds, *[("corpus", self._corpus_request)] * len(kinds)])

    def _corpus_request(self) -> httpx2.Response:
        path, content = self._rng.choice(self._corpus)
        return self._client.post(path, content=content, headers=_JSON)

    def _random_bytes(self) -> httpx2.Response:
        content = self._rng.randbytes(self._rng.choice((0, 1, 100, 10_000)))
        kind = self._rng.choice(("application/json", "multipart/form-data; boundary=x", "", "text"))
        path = self._rng.choice(_ROUTES)
        return self._client.post(path, content=content, headers={"content-type": kind})

    def _large_body(self) -> httpx2.Response:
        prompt: Any = self._rng.choice((["a b "] * 100_000, "word " * (_LARGE_BYTES // 5)))
        messages = [{"role": "user", "content": str(prompt)}]
        bodies = {
            COMPLETIONS: completion_body(prompt, 4),
            CHAT: {"model": "default", "messages": messages},
            "/generate": {"text": prompt, "sampling_params": {"max_new_tokens": 4}},
        }
        path, body = self._rng.choice(list(bodies.items()))
        return self._client.post(path, content=orjson.dumps(body), headers=_JSON)

    def _large_line(self) -> httpx2.Response:
        body = completion_body("word " * (_LARGE_BYTES // 5), 4)
        line = {"custom_id": "large", "method": "POST", "url": COMPLETIONS, "body": body}
        headers = {"authorization": f"Bearer storm-{self._rng.randrange(4)}"}
        file = {"file": ("large.jsonl", orjson.dumps(line))}
        purpose = {"purpose": "batch"}
        response = self._client.post("/v1/files", data=purpose, files=file, headers=headers)
        if not response.is_success:
            return response
        batch = {
            "input_file_id": response.json()["id"],
            "endpoint": COMPLETIONS,
            "completion_window": "24h",
        }
        return self._client.post("/v1/batches", json=batch, headers=headers)

    def _endless_form(self) -> httpx2.Response:
        def parts() -> Iterator[bytes]:
            for number in range(20_000):
                name = f'Content-Disposition: form-data; name="f{number}"'
                yield f"--x\r\n{name}\r\n\r\n{number}\r\n".encode()

        kind = {"content-type": "multipart/form-data; boundary=x"}
        return self._client.post("/v1/files", content=parts(), headers=kind)

    def _abandoned_streams(self) -> None:
        for _ in range(_STREAMS_ABANDONED):
            body = completion_body("the old mill", 500, stream=True)
            with self._client.stream("POST", COMPLETIONS, json=body) as response:
                next(response.iter_bytes(), None)

    def _unknown_ids(self) -> httpx2.Response:
        names = ("x", "batch_" + "0" * 24, "file-" + "f" * 24, "%2e%2e%2f", "a" * 99)
        name = self._rng.choice(names)
        calls = (
            ("GET", f"/v1/batches/{name}"),
            ("POST", f"/v1/batches/{name}/cancel"),
            ("POST", f"/v1/batches/{name}/resume"),
            ("GET", f"/v1/files/{name}/content"),
            ("DELETE", f"/v1/files/{name}"),
            ("GET", "/v1/files?limit=10000"),
            ("GET", "/v1/batches?limit=100"),
        )
        method, path = self._rng.choice(calls)
        return self._client.request(method, path, headers={"range": "bytes=5-2"})
