"""When requests came; what is ended when their clients have gone, and goes on later.

A request that arrives during a step reaches the scheduler only at the end of that step; a scheduler
that counted from there would miss the time waited so far. SGLang leaves the arrival time out of its
message to the scheduler; here it is added.

SGLang asks whether the client of an unfinished request is still there only every four seconds, and
after a step. What it computes until then is for nobody, and what waits or is suspended for it
holds its place before others. So it is ended as soon as the client has gone.

A gateway that wants the engine for others evicts a request: it closes the connection, and sends the
same request again later, with the same id in a header. What was generated until then is kept here;
the second request begins with it, as a line of a batch does that was interrupted.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final

import msgspec
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

from sglang_coserve.srt import compat

_ID_HEADERS: Final = ("idempotency-key", "x-request-id")
_OWNER_HEADERS: Final = ("authorization", "x-api-key")

_KEPT_S: Final = 3600.0
_MOST_REQUESTS: Final = 4096
_MOST_TOKENS: Final = 1 << 20
"""Of all requests; 36 MB."""


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return what names a request and whoever sends it; None if it has no name."""
    name = next((headers[each] for each in _ID_HEADERS if headers.get(each)), None)
    owner = [headers.get(each, "") for each in _OWNER_HEADERS]
    return None if name is None else "\n".join((name, *owner))


def identity_of(key: str, tokenized: Any, weights: str) -> bytes:
    """Return what two requests have in common of which the second goes on with the first.

    Its key, its prompt and its parameters, but for what is said of its class; ``tokenized`` is
    SGLang's message to the scheduler, ``weights`` the name of what generates the tokens.
    """
    params = msgspec.structs.replace(tokenized.sampling_params, custom_params=None)
    parts = (key.encode(), weights.encode(), array("q", tokenized.input_ids).tobytes())
    digest = blake2b(msgspec.msgpack.encode(params), digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8) + part)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class _Interrupted:
    tokens: Sequence[int]
    """SGLang's list of them, to which the last ones are added after the client has left."""

    before: Sequence[int]
    """Those that it began with."""

    num_tokens: int
    until_s: float


class InterruptedRequests:
    """What requests had generated whose clients left, for an hour, and for each request once."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._kept: dict[bytes, _Interrupted] = {}
        self._num_tokens = 0

    def keep(self, identity: bytes, tokens: Sequence[int], before: Sequence[int]) -> None:
        """Keep the ``tokens`` of a request, of which those ``before`` may not have come back yet.

        The oldest ones give way. O(1), but for those.
        """
        self._take(identity)
        until_s = self._now_s() + _KEPT_S
        num_tokens = max(len(tokens), len(before))
        self._kept[identity] = _Interrupted(tokens, before, num_tokens, until_s)
        self._num_tokens += num_tokens
        while len(self._kept) > _MOST_REQUESTS or self._num_tokens > _MOST_TOKENS:
            self._take(next(iter(self._kept)))

    def take(self, identity: bytes) -> list[int]:
        """Return the tokens that a request goes on after; empty if nothing is known of it.

        Without the last one: SGLang takes it from the step during which the request is aborted, and
        does not look any more whether it ends the generation.
        """
        kept = self._take(identity)
        if kept is None or kept.until_s < self._now_s():
            return []
        tokens = kept.tokens[:-1]
        return list(tokens if len(tokens) > len(kept.before) else kept.before)

    def _take(self, identity: bytes) -> _Interrupted | None:
        kept = self._kept.pop(identity, None)
        self._num_tokens -= kept.num_tokens if kept is not None else 0
        return kept


class ArrivalTimeStats(APIServerReqTimeStats):
    """SGLang's times of a request, which also send the arrival time to the scheduler."""

    attributes: Mapping[str, str] = MappingProxyType({})
    """Its service tier and what is asked for, as OpenTelemetry names them."""

    def __getstate__(self) -> object:
        """Return the state that is sent to the scheduler."""
        state = super().__getstate__()
        assert isinstance(state, dict)
        # SGLang's counterpart translates values whose name ends like this to its own clock.
        state["created_time"] = self.created_time
        return state


def install_arrival_times() -> None:
    """Make SGLang's tokenizer manager in this process send arrival times."""
    compat.replace("sglang.srt.managers.tokenizer_manager.APIServerReqTimeStats", ArrivalTimeStats)


class _Call:
    """What one HTTP request has in the engine."""

    def __init__(self, key: str | None) -> None:
        self.rids: list[str] = []
        self.has_left = False
        """Whether its client has."""

        self.key = key
        self.identity: bytes | None = None
        """By which its only request is known when it is sent again; None if it is not to be."""

        self.began_with: list[int] = []
        """Output tokens of that request, which its client has sent before."""


_CALL: Final[ContextVar[_Call | None]] = ContextVar("what is served", default=None)


class ClientDepartures:
    """Watches the connection of each HTTP request while it is served."""

    def __init__(
        self, abort: Callable[[str], None], output_of: Callable[[str], Sequence[int] | None]
    ) -> None:
        """Watch the clients of an engine.

        Args:
            abort: Ends the request of an id, and ignores one that has ended.
            output_of: Returns the output tokens of the request of an id, to which more are added as
                they come; None of one that has ended.
        """
        self._abort = abort
        self._output_of = output_of
        self._interrupted = InterruptedRequests()

    @asynccontextmanager
    async def watched(self, request: Any, key: str | None = None) -> AsyncGenerator[None]:
        """Abort what is sent within this context when the client of ``request`` leaves.

        Args:
            request: A Starlette request whose body has been read. Others, and None, have no
                connection to watch.
            key: What names it (``key_of``), if it is one request of the engine's that can go on
                after its tokens.
        """
        if not hasattr(request, "receive"):
            _CALL.set(None)
            yield
            return
        call = _Call(key)
        _CALL.set(call)
        watching = asyncio.create_task(self._watch(request, call))
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            # Whoever reads the answer has seen it first.
            self._leave(call)
            raise
        finally:
            watching.cancel()

    def sending(self, rid: str) -> None:
        """Note that a request is about to be sent to the engine for the client of this context.

        Raises:
            ValueError: the client has left.
        """
        call = _CALL.get()
        if call is None:
            return
        if call.has_left:
            raise ValueError(f"request {rid} is not sent to the engine: its client has left")
        call.rids.append(rid)

    def generated_before(self, tokenized: Any, weights: str) -> Sequence[int]:
        """Return the output tokens that the request of this context had when its client left and
        before it was sent again; see ``identity_of``."""
        call = _CALL.get()
        if call is None or call.key is None:
            return ()
        call.identity = identity_of(call.key, tokenized, weights)
        call.began_with = self._interrupted.take(call.identity)
        return call.began_with

    async def _watch(self, request: Any, call: _Call) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._leave(call)

    def _leave(self, call: _Call) -> None:
        if call.has_left:
            return
        call.has_left = True
        if call.identity is not None:
            tokens = self._output_of(call.rids[0]) if call.rids else ()
            if tokens is not None:
                self._interrupted.keep(call.identity, tokens, call.began_with)
        for rid in call.rids:
            self._abort(rid)
