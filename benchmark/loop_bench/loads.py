"""What arrives while the event loop is watched. Each load is called over and over."""

from __future__ import annotations

import functools
import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import httpx

from common.batch_server import BatchServer
from common.input_file import COMPLETIONS

__all__ = ["LOADS", "Loads"]

_MIB: Final = 1 << 20
_LINE_BYTES: Final = 15 * _MIB
_LINES: Final = 3
_CALL_TIMEOUT_S: Final = 300.0
_PROSE: Final = ("the quick brown fox, jumps over the lazy dog. " * (_LINE_BYTES // 40))[
    :_LINE_BYTES
]
_FINAL: Final = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True)
class Loads:
    """Loads for one server."""

    server: BatchServer
    host: str
    port: int

    def batch_of_text(self) -> None:
        """Lines of 15 MiB of prose."""
        self._batch(_lines(prompt=_PROSE))

    def batch_of_values(self) -> None:
        """Lines of 900,000 strings, which is nearly as many values as a line may have."""
        self._batch(_lines(prompt=("the mill",) * 900_000))

    def batch_of_token_ids(self) -> None:
        """Lines of 900,000 token ids."""
        self._batch(_lines(prompt=(1234,) * 900_000))

    def endless_form(self) -> None:
        """Parts without end before the file, for a second or until the server has enough."""
        head = (
            "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
        )
        part = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        parts = part * (60_000 // len(part))
        chunk = f"{len(parts):x}\r\n".encode() + parts + b"\r\n"
        until_s = time.perf_counter() + 1.0
        with socket.create_connection((self.host, self.port), timeout=_CALL_TIMEOUT_S) as client:
            client.sendall(head.encode())
            client.setblocking(True)
            with suppress(OSError):
                while time.perf_counter() < until_s:
                    client.sendall(chunk)

    def lists(self) -> None:
        """All files and a page of batches."""
        self._call("GET", "/v1/files")
        self._call("GET", "/v1/batches?limit=100")
        time.sleep(0.05)

    def online_chat(self) -> None:
        """A chat of 15 MiB."""
        self._post("/v1/chat/completions", _body(messages=_chat(_PROSE)))

    def online_completion(self) -> None:
        """A completion of 15 MiB of token ids."""
        self._post("/v1/completions", _body(prompt=(1234,) * (_LINE_BYTES // 6)))

    def online_generate(self) -> None:
        """A prompt of 15 MiB on SGLang's own route."""
        self._post("/generate", _body(text=_PROSE))

    def online_near_limit(self) -> None:
        """A chat that is as large as a body may be, and longer than the model takes."""
        self._post("/v1/chat/completions", _body(messages=_chat(_PROSE[: 4 * _MIB - 1000])))

    def _batch(self, content: bytes) -> None:
        client = self.server.client
        file_id = client.files.create(file=("large.jsonl", content), purpose="batch").id
        batch_id = self.server.create(file_id)
        # A slow look, for it is a call, too.
        while client.batches.retrieve(batch_id).status not in _FINAL:
            time.sleep(0.25)

    def _post(self, path: str, body: bytes) -> None:
        self._call("POST", path, content=body, headers={"content-type": "application/json"})

    def _call(self, method: str, path: str, **arguments: Any) -> None:
        with suppress(httpx.HTTPError):  # Refused while it was being sent.
            url = f"{self.server.base_url}{path}"
            httpx.request(method, url, timeout=_CALL_TIMEOUT_S, trust_env=False, **arguments)


def _chat(text: str) -> tuple[tuple[str, str], ...]:
    return (("user", text),)


# Made once: the client's work is not to take the server's cores.
@functools.cache
def _body(**fields: Any) -> bytes:
    if "messages" in fields:
        messages = [{"role": role, "content": text} for role, text in fields["messages"]]
        fields = {**fields, "messages": messages}
    return json.dumps({"model": "m", **fields}).encode()


@functools.cache
def _lines(**fields: Any) -> bytes:
    common = {"method": "POST", "url": COMPLETIONS, "body": {"model": "m", **fields}}
    lines = [json.dumps({"custom_id": str(n), **common}) for n in range(_LINES)]
    return "\n".join(lines).encode()


LOADS: Final[Mapping[str, Callable[[Loads], None]]] = {
    "batches: 15 MiB of text": Loads.batch_of_text,
    "batches: 900,000 strings": Loads.batch_of_values,
    "batches: 900,000 token ids": Loads.batch_of_token_ids,
    "endless form": Loads.endless_form,
    "lists of 10,000 files, 100 batches": Loads.lists,
    "chat of 15 MiB": Loads.online_chat,
    "completion of 15 MiB of token ids": Loads.online_completion,
    "/generate of 15 MiB": Loads.online_generate,
    "chat of 4 MiB": Loads.online_near_limit,
}
