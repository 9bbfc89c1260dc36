"""Engines behind a router as one engine of a gateway: the router places the lines.

Lines are ordinary requests with ``service_tier: flex``. Only our engines know that the requests
are offline; others serve them like any. A router passes no tokens on before the answer, so a line
starts over when its engine ends.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import aiohttp

from sglang_coserve.errors import ServerError
from sglang_coserve.http_lines.http_engine import AttemptListener, ask
from sglang_coserve.http_lines.messages import (
    EngineDelays,
    EngineLostError,
    EngineRefusesError,
    EngineReport,
)
from sglang_coserve.http_lines.plain_server import PlainServer
from sglang_coserve.lines.backend import ENDPOINTS, FailureKind, LineRequest, LineResult
from sglang_coserve.network import http_address

KEY_VARIABLE: Final = "COSERVE_ROUTER_API_KEY"
_MODELS_PATH: Final = "/v1/models"
_NO_HINTS: Final = MappingProxyType[int, str]({})

_ROUTER_FAILURES: Final = {502: FailureKind.LOST, 504: FailureKind.TIMED_OUT}
"""A router answers so for an engine that has ended, or took too long, with the line in it."""

_ANY_MODEL: Final = (None, "", "default")
"""Values of ``model`` in lines that any model may serve."""

_DEADLINE_HEADER: Final = "x-llm-d-inference-ttl"
"""Time until the batch should be complete, which our engines take for the deadline of an offline
request. The header is llm-d's. smg 1.13.0 drops all headers but the id of the request (tried), so
lines have no deadline behind it."""


class RoutedEngines:
    """Speaks with a router as ``HttpEngine`` does with an engine."""

    def __init__(self, url: str, api_key: str | None, most_lines: int) -> None:
        """Take the router's address and key; ``most_lines`` are sent at a time.

        Raises:
            ConfigError: the address cannot be used.
        """
        address = http_address(url, "--router")
        self.url = str(address).rstrip("/")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._most_lines = most_lines
        self._server = PlainServer(address, headers, most_lines)
        self._asking = aiohttp.ClientSession(headers=headers)
        self._num_lines = 0
        self._models: tuple[str, ...] = ()
        """Names of the last report."""

    async def close(self) -> None:
        """Close every connection, which ends the attempts."""
        await self._asking.close()
        await self._server.close()

    async def report(self) -> EngineReport:
        """Ask for the models that the router serves, and report the router as a busy engine.

        Raises:
            EngineLostError: the router does not answer, or has no engine.
            EngineRefusesError: it refuses the key, or is no router.
        """
        content = await self.ask(_MODELS_PATH)
        try:
            models = tuple(sorted(str(card["id"]) for card in json.loads(content)["data"]))
        except (ValueError, LookupError, TypeError) as error:
            message = f"{self.url}{_MODELS_PATH} does not list models: {error!r}"
            raise EngineRefusesError(message) from None
        self._models = models
        if not models:
            raise EngineLostError(f"{self.url} serves no model now")
        return EngineReport(
            run=self.url,
            model=self.url,
            models=models,
            # A router does not say which of these its engines serve: they refuse the others.
            endpoints=ENDPOINTS,
            lines=self._num_lines,
            most_lines=self._most_lines,
        )

    async def delays(self) -> EngineDelays:
        """Return that nothing is known of delays behind a router."""
        return EngineDelays(self.url)

    async def ask(self, path: str) -> bytes:
        """Return what the router answers to GET; raises as ``report``."""
        return await ask(self._asking, self.url, path, _NO_HINTS)

    async def run(self, request: LineRequest, _model: str, listener: AttemptListener) -> LineResult:
        """Make one attempt at a line. All tokens come with the answer.

        A failure is a result: nobody knows which engine it was, so the line may be at fault.

        Raises:
            EngineRefusesError: the router refuses the key.
        """
        headers = {}
        if request.deadline_s is not None:
            left_s = max(0.0, request.deadline_s - time.time())
            headers[_DEADLINE_HEADER] = f"{left_s:.0f}s"
        if request.body.get("model") in _ANY_MODEL and len(self._models) == 1:
            # Routers go by the name.
            request.body["model"] = self._models[0]
        self._num_lines += 1
        listener.began(self.url)
        try:
            result = await self._server.post(request, headers=headers)
        except ServerError as error:
            message = f"{self.url}: {error}: for a gateway, that is {KEY_VARIABLE}"
            raise EngineRefusesError(message) from None
        finally:
            self._num_lines -= 1
        kind = _ROUTER_FAILURES.get(result.status_code)
        return result if kind is None else replace(result, kind=kind)

    async def hand_back(self, _attempt: str) -> bool:
        """Return False: a router hands no line back."""
        return False
