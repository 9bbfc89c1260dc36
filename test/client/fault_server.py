"""An OpenAI-shaped HTTP server that answers with the prompt, and fails on demand.

Real sockets, because what a client must survive (a connection dropped in the
middle of an answer, a server that dies and comes back) happens there. What goes
wrong with a line is written in its body: ``faults`` lists what happens to its
first, second, … attempt; ``faults_forever`` happens to every later one.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

from aiohttp import web
from anyio.from_thread import start_blocking_portal


class FaultServer:
    """A server on a free loopback port, on an event loop in a thread of its own."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.authorization: list[str | None] = []
        self.most_active = 0
        self.refuses_keys_with: int | None = None
        """A status."""
        self.on_request: Callable[[int], None] = lambda _count: None
        """Called with the number of requests so far, before each is answered."""
        self._attempts: Counter[str] = Counter()
        self._active = 0
        self._port = 0
        self._ending = ExitStack()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def prompts(self) -> Counter[str]:
        """How often each prompt arrived."""
        return Counter(_prompt(body) for body in self.bodies)

    def __enter__(self) -> Self:
        self._portal = self._ending.enter_context(start_blocking_portal())
        self.come_back()
        self._ending.callback(self._portal.call, self.die_here)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def come_back(self) -> None:
        """Listen, on the same port as before."""
        self._portal.call(self._listen)

    def die_here(self) -> None:
        """From within ``on_request``: stop listening and cut every connection, as a killed process
        does; that request is never answered.
        """
        self._listener.close()
        for connection in self._web.connections:
            if connection.transport:
                connection.transport.abort()

    def come_back_after(self, delay_s: float) -> None:
        """Like ``come_back``, later, from within ``on_request``."""
        loop = asyncio.get_running_loop()
        loop.call_later(delay_s, lambda: loop.create_task(self._listen()))

    async def _listen(self) -> None:
        self._web = web.Server(self._serve)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._web, "127.0.0.1", self._port)
        self._port = self._listener.sockets[0].getsockname()[1]

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return _json({"detail": "Not Found"}, 404)  # It has no Batch API.
        body = await request.json()
        self.paths.append(request.path)
        self.authorization.append(request.headers.get("authorization"))
        self.bodies.append(body)
        self._active += 1
        self.most_active = max(self.most_active, self._active)
        try:
            self.on_request(len(self.bodies))
            return await self._answer(body, request)
        finally:
            self._active -= 1

    async def _answer(self, body: dict[str, Any], request: web.BaseRequest) -> web.StreamResponse:
        if self.refuses_keys_with:
            return _json({"error": {"message": "no such key"}}, self.refuses_keys_with)
        attempt = self._attempts[_prompt(body)]
        self._attempts[_prompt(body)] += 1
        faults = body.get("faults", [])
        fault = faults[attempt] if attempt < len(faults) else body.get("faults_forever", "")
        kind, _, argument = fault.partition(" ")
        match kind:
            case "drop":
                request.transport.abort()
            case "half":
                whole = _json(_echo(body)).body
                answer = web.StreamResponse(headers={"content-length": str(len(whole))})
                await answer.prepare(request)
                await answer.write(whole[:-10])
                request.transport.abort()
                return answer
            case "hang":
                await asyncio.sleep(3600)
            case "slow":
                await asyncio.sleep(float(argument))
            case "crowd":
                while self.most_active < int(argument):
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.02)  # Time for one request more, if the client sends it.
            case "abort":
                return _json(_echo(body, finish_reason="abort"))
            case "html":
                return web.Response(text="<html>a proxy</html>")
            case status if status.isdecimal():
                error = {"object": "error", "message": f"fault {status}", "code": int(status)}
                headers = {"retry-after": argument} if argument else {}
                return _json(error, int(status), headers)
        return _json(_echo(body))


def _json(content: Any, status: int = 200, headers: Any = None) -> web.Response:
    # Pretty-printed, because a client must not rely on answers being one line.
    body = json.dumps(content, indent=1).encode()
    return web.Response(body=body, status=status, headers=headers)


def _prompt(body: dict[str, Any]) -> str:
    if "messages" in body:
        return str(body["messages"][0]["content"])
    return str(body.get("prompt", body.get("input")))


def _echo(body: dict[str, Any], finish_reason: str = "stop") -> dict[str, Any]:
    text = _prompt(body)
    said = {"message": {"content": text}} if "messages" in body else {"text": text}
    return {
        "id": f"rid-{text[:20]}",
        "choices": [said | {"finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        "service_tier": body.get("service_tier"),
    }
