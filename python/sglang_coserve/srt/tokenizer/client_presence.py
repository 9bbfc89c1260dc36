"""When clients came, as they would count it, and what is ended when they have gone.

A request that arrives during a step reaches the scheduler only at the end of that step; a scheduler
that counted from there would miss the time waited so far. SGLang leaves the arrival time out of its
message to the scheduler; here it is added.

Nor does a client get a token when the scheduler has it: the token passes through the detokenizer
and the HTTP server, which takes some milliseconds on busy cores. Targets are meant as seen by the
client, so the time sent is earlier than the arrival by the usual delay of recent first tokens
(``OutputDelay``).

SGLang asks whether the client of an unfinished request is still there only every four seconds, and
after a step. What it computes until then is for nobody, and what waits or is suspended for it
holds its place before others. So it is ended as soon as the client has gone. What it had generated
is kept, if it can be told when it is sent again (``interrupted``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from statistics import median
from types import MappingProxyType
from typing import Any, Final

from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

from sglang_coserve.srt import compat
from sglang_coserve.srt.tokenizer.interrupted import InterruptedRequests, identity_of

__all__ = ["ArrivalTimeStats", "ClientDepartures", "OutputDelay", "install_arrival_times"]

_MOST_DELAYS: Final = 32
_FEWEST_DELAYS: Final = 3
"""The first ones are longer: nothing is warm."""

_TIMED_EVERY: Final = 4
"""SGLang's scheduler sends its times with every token of a request that asks for them."""


class ArrivalTimeStats(APIServerReqTimeStats):
    """SGLang's times of a request, which also send the arrival time to the scheduler."""

    output_delay_s: float = 0.0
    is_timed: bool = False
    attributes: Mapping[str, str] = MappingProxyType({})
    """Its service tier and what is asked for, as OpenTelemetry names them."""

    def __getstate__(self) -> object:
        """Return the state that is sent to the scheduler."""
        state = super().__getstate__()
        assert isinstance(state, dict)
        # SGLang's counterpart translates values whose name ends like this to its own clock.
        state["created_time"] = self.created_time - self.output_delay_s
        if self.is_timed:
            state["has_timing_data"] = True
        return state


class OutputDelay:
    """Measures how long first tokens take from the scheduler to the HTTP server."""

    def __init__(self) -> None:
        self._delays_s: deque[float] = deque(maxlen=_MOST_DELAYS)
        self._num_requests = 0

    @property
    def usual_s(self) -> float:
        """Median over recent requests; 0 while fewer than three are known."""
        return median(self._delays_s) if len(self._delays_s) >= _FEWEST_DELAYS else 0.0

    def make_stats(self, *args: Any, **kwargs: Any) -> ArrivalTimeStats:
        """Return the times object of a new request; takes the arguments of SGLang's class."""
        stats = ArrivalTimeStats(*args, **kwargs)
        stats.output_delay_s = self.usual_s
        stats.is_timed = self._num_requests % _TIMED_EVERY == 0
        self._num_requests += 1
        return stats

    def without_token(self, rids: Sequence[str], states: Mapping[str, Any]) -> dict[int, Any]:
        """Return the times of the requests without a first token so far, by index. O(requests).

        Only for requests whose times the scheduler sends back, and which stream: the scheduler
        keeps the first tokens of the others until there are dozens of them.
        """
        found = ((i, states[rid]) for i, rid in enumerate(rids) if rid in states)
        return {
            i: state.time_stats
            for i, state in found
            if state.time_stats.is_timed
            and not state.time_stats.first_token_time
            and getattr(state.obj, "stream", False)
        }

    def observe(self, times: Mapping[int, Any], scheduler_times: Sequence[Any] | None) -> None:
        """Record the delays of the requests of ``without_token``, once they have their token.

        ``scheduler_times`` are the scheduler's times that came with the tokens of the batch.
        """
        for index, stats in times.items():
            sent_s = scheduler_times[index].prefill_finished_time if scheduler_times else 0.0
            if sent_s and stats.first_token_time:
                # Since 0.5.22 SGLang may take the scheduler's time for that of the first token.
                self._delays_s.append(max(stats.last_time - sent_s, 0.0))


def install_arrival_times() -> OutputDelay:
    """Make SGLang's tokenizer manager in this process send arrival times.

    Returns the object that has to observe the tokens that come back.
    """
    delay = OutputDelay()
    compat.replace("sglang.srt.managers.tokenizer_manager.APIServerReqTimeStats", delay.make_stats)
    return delay


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
