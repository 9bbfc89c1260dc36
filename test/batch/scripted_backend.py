"""An engine that answers as it is told, and generates what every run of it would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.backend import (
    BackendLoad,
    ChangeListeners,
    LineMovedError,
    LineRequest,
    LineResult,
    MovedKv,
)

ENDPOINT = "/v1/completions"
RESPONSES = "/v1/responses"


def name_of(request: LineRequest) -> str:
    """The ``custom_id`` of a line of ``scenarios.line``, which is its prompt, too; the input of a
    response, and the first message of a chat."""
    if "messages" in request.body:
        return str(request.body["messages"][0]["content"])
    return str(request.body.get("input" if request.endpoint == RESPONSES else "prompt"))


def tokens_of(custom_id: str, count: int) -> list[int]:
    """The first ``count`` tokens that are generated for a line."""
    return [
        int.from_bytes(blake2b(f"{custom_id}/{n}".encode(), digest_size=4).digest())
        for n in range(count)
    ]


def answer(request: LineRequest) -> LineResult:
    """What is answered to ``request``: all of its tokens, whoever generated them."""
    count = request.body.get("max_tokens", 4)
    tokens = tokens_of(name_of(request), count)
    usage = {"prompt_tokens": 3, "completion_tokens": count}
    text = " ".join(map(str, tokens))
    body: dict[str, Any] = {"choices": [{"text": text}], "usage": usage}
    if "messages" in request.body:
        message = {"role": "assistant", "content": text}
        body["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
    if request.endpoint == RESPONSES:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
        output = [{**item, "content": [part]}]
        body = {"id": "resp_of_the_engine", "model": "scripted", "output": output}
        body["usage"] = {"input_tokens": 3, "output_tokens": count, "total_tokens": 3 + count} | {
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        body |= {"object": "response", "status": "completed"}
    return LineResult(200, f"cmpl-{name_of(request)}", body)


def failure(status_code: int, *, is_retryable: bool = False) -> LineResult:
    """What is answered when it went wrong."""
    return LineResult(status_code, "cmpl-x", {"error": {"message": "no"}}, is_retryable)


@dataclass(eq=False)
class InFlight:
    """A request that the engine has."""

    request: LineRequest
    on_tokens: Callable[[Sequence[int]], None]
    result: asyncio.Future[LineResult]
    generated: int = 0

    def generate(self, count: int) -> None:
        """Generate ``count`` more tokens."""
        custom_id = name_of(self.request)
        self.on_tokens(tokens_of(custom_id, self.generated + count)[self.generated :])
        self.generated += count

    def finish(self, result: LineResult | None = None) -> None:
        """Answer the request."""
        if not self.result.done():
            self.result.set_result(result or answer(self.request))


@dataclass
class ScriptedBackend:
    """Answers at once, or holds requests until the test answers them."""

    holds: bool = False
    answers: Callable[[LineRequest], LineResult] = answer
    tokens_per_s: float | None = None
    is_online_busy: bool = False
    total_tokens: int = 0
    max_in_flight: int | None = None
    num_engines: int = 1
    model: str = "scripted"
    endpoints: frozenset[str] = frozenset({ENDPOINT, "/v1/chat/completions", RESPONSES})
    limits: BodyLimits = field(default_factory=BodyLimits)
    model_names: tuple[str, ...] = ()
    in_flight: list[InFlight] = field(default_factory=list)
    started: list[LineRequest] = field(default_factory=list)
    aborted: list[LineRequest] = field(default_factory=list)

    delays_s: dict[str, float] | None = None
    is_changing: bool = False
    stalled_by: str | None = None
    listeners: ChangeListeners = field(default_factory=ChangeListeners)
    leaves: MovedKv | None = None
    """What it leaves of a line that it hands back; None: it hands none back."""

    def when_changing(self, take_out: Callable[[], None]) -> Callable[[], None]:
        return self.listeners.add(take_out)

    def take_out(self) -> None:
        self.listeners.tell()

    async def online_delays_s(self) -> dict[str, float] | None:
        return None if self.delays_s is None else dict(self.delays_s)

    async def settled(self) -> None:
        while self.is_changing:
            await asyncio.sleep(0.001)

    async def run(
        self, request: LineRequest, on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        self.started.append(request)
        count = len(request.generated)
        assert list(request.generated) == tokens_of(name_of(request), count), "not its tokens"
        if not self.holds:
            await asyncio.sleep(0)
            return self.answers(request)
        entry = InFlight(request, on_tokens, asyncio.Future(), count)
        self.in_flight.append(entry)
        try:
            return await entry.result
        except asyncio.CancelledError:
            self.aborted.append(request)
            raise
        finally:
            self.in_flight.remove(entry)

    def hand_back(self, request: LineRequest) -> bool:
        for entry in self.in_flight:
            if self.leaves is not None and entry.request is request:
                entry.generate(1)
                entry.result.set_exception(LineMovedError("asked for", self.leaves))
                return True
        return False

    def prompt_tokens(self, request: LineRequest) -> int:
        return len(name_of(request))

    def load(self) -> BackendLoad:
        return BackendLoad(
            self.tokens_per_s,
            self.is_online_busy,
            self.total_tokens,
            self.max_in_flight,
            self.num_engines,
        )

    def finish_all(self) -> None:
        """Answer every request that is in flight."""
        for entry in list(self.in_flight):
            entry.finish()

    def held(self, custom_id: str) -> InFlight:
        """The request of a line that is in flight."""
        (entry,) = (e for e in self.in_flight if name_of(e.request) == custom_id)
        return entry
