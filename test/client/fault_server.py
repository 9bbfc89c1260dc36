"""An OpenAI-shaped HTTP server that answers with the prompt, and fails on demand.

Real sockets, because what a client must survive (a connection dropped in the
middle of an answer, a server that dies and comes back) happens there. What goes
wrong with a line is written in its body: ``faults`` lists what happens to its
first, second, … attempt; ``faults_forever`` happens to every later one.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")

_LOOP_CALL_TIMEOUT_S = 20.0


class FaultServer:
    """A server on a free loopback port, on an event loop in a thread of its own."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.authorization: list[str | None] = []
        self.most_active = 0
        self.refuses_keys = False
        self.on_request: Callable[[int], None] = lambda _count: None
        """Called with the number of requests so far, before each is answered."""
        self._attempts: Counter[str] = Counter()
        self._active = 0
        self._port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def prompts(self) -> Counter[str]:
        """How often each prompt arrived."""
        return Counter(_prompt(body) for body in self.bodies)

    def __enter__(self) -> Self:
        self._thread.start()
        self.come_back()
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LOOP_CALL_TIMEOUT_S)
        self._loop.close()

    def come_back(self) -> None:
        """Listen, on the same port as before."""
        self._run(self._listen())

    def die(self) -> None:
        """Stop listening and cut every connection, as a killed process does."""
        self._run(self._die())

    def die_here(self) -> None:
        """Like ``die``, from within ``on_request``: that request is never answered."""
        if self._server:
            self._server.close()
            self._server = None
        for writer in self._connections:
            writer.transport.abort()

    def come_back_after(self, delay_s: float) -> None:
        """Like ``come_back``, later, from within ``on_request``."""
        self._loop.call_later(delay_s, lambda: self._loop.create_task(self._listen()))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(_LOOP_CALL_TIMEOUT_S)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _die(self) -> None:
        self.die_here()

    async def _end(self) -> None:
        self.die_here()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(writer)
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; return whether the connection stays."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request_line, *header_lines = head.split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in header_lines if line)
        }
        if request_line.startswith("GET "):
            writer.write(_http(404, b'{"detail": "Not Found"}'))  # It has no Batch API.
            return True
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.paths.append(request_line.split()[1])
        self.authorization.append(headers.get("authorization"))
        self.bodies.append(body)
        self._active += 1
        self.most_active = max(self.most_active, self._active)
        try:
            self.on_request(len(self.bodies))
            return await self._answer(body, writer)
        finally:
            self._active -= 1

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if self.refuses_keys:
            writer.write(_http(401, b'{"error": {"message": "no such key"}}'))
            return True
        attempt = self._attempts[_prompt(body)]
        self._attempts[_prompt(body)] += 1
        faults = body.get("faults", [])
        fault = faults[attempt] if attempt < len(faults) else body.get("faults_forever", "")
        kind, _, argument = fault.partition(" ")
        match kind:
            case "drop":
                return False
            case "half":
                writer.write(_http(200, _echo(body))[:-10])
                await writer.drain()
                return False
            case "hang":
                await asyncio.sleep(3600)
            case "slow":
                await asyncio.sleep(float(argument))
            case "abort":
                writer.write(_http(200, _echo(body, finish_reason="abort")))
                return True
            case "html":
                writer.write(_http(200, b"<html>a proxy</html>"))
                return True
            case status if status.isdecimal():
                error = {"object": "error", "message": f"fault {status}", "code": int(status)}
                writer.write(_http(int(status), json.dumps(error).encode(), retry_after=argument))
                return True
        writer.write(_http(200, _echo(body)))
        await writer.drain()
        return True


def _prompt(body: dict[str, Any]) -> str:
    if "messages" in body:
        return str(body["messages"][0]["content"])
    return str(body.get("prompt", body.get("input")))


def _echo(body: dict[str, Any], finish_reason: str = "stop") -> bytes:
    text = _prompt(body)
    said = {"message": {"content": text}} if "messages" in body else {"text": text}
    answer = {
        "id": f"rid-{text[:20]}",
        "choices": [said | {"finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        "service_tier": body.get("service_tier"),
    }
    # Pretty-printed, because a client must not rely on answers being one line.
    return json.dumps(answer, indent=1).encode()


def _http(status: int, body: bytes, retry_after: str = "") -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
    if retry_after:
        lines.append(f"retry-after: {retry_after}")
    return "\r\n".join([*lines, "", ""]).encode() + body
