"""When requests came, and what is ended when their clients have gone.

A request that arrives during a step reaches the scheduler only at the end of that step; a scheduler
that counted from there would miss the time waited so far. SGLang leaves the arrival time out of its
message to the scheduler; here it is added.

SGLang asks whether the client of an unfinished request is still there only every four seconds, and
after a step. What it computes until then is for nobody, and what waits or is suspended for it
holds its place before others. So it is ended as soon as the client has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final

from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

from sglang_coserve.srt import compat


class ArrivalTimeStats(APIServerReqTimeStats):
    """SGLang's times of a request, which also tell the scheduler when it arrived, and when it was
    sent."""

    attributes: Mapping[str, str] = MappingProxyType({})
    """Its service tier and what is asked for, as OpenTelemetry names them."""

    def __getstate__(self) -> object:
        """Return the state that is sent to the scheduler."""
        state = super().__getstate__()
        assert isinstance(state, dict)
        # SGLang's counterpart translates values whose name ends like this to its own clock.
        state["created_time"] = self.created_time
        state["api_server_dispatch_time"] = self.api_server_dispatch_time
        return state


def install_arrival_times() -> None:
    """Make SGLang's tokenizer manager in this process send arrival times."""
    compat.replace("sglang.srt.managers.tokenizer_manager.APIServerReqTimeStats", ArrivalTimeStats)


class _Call:
    """What one HTTP request has in the engine."""

    def __init__(self) -> None:
        self.rids: list[str] = []
        self.has_left = False
        """Whether its client has."""


_POLL_S: Final = 0.01

_CALL: Final[ContextVar[_Call | None]] = ContextVar("what is served", default=None)


class ClientDepartures:
    """Watches the connection of each HTTP request while it is served."""

    def __init__(self, manager: Any) -> None:
        """``manager`` is SGLang's tokenizer manager, which aborts requests."""
        self._manager = manager

    @asynccontextmanager
    async def watched(self, request: Any) -> AsyncGenerator[None]:
        """Abort what is sent within this context when the client of ``request`` leaves.

        That is a Starlette request whose body has been read. Others, and None, have no connection
        to watch.
        """
        if not hasattr(request, "receive"):
            _CALL.set(None)
            yield
            return
        call = _Call()
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

    def sending(self, tokenized: Any) -> None:
        """Note that a request is about to be sent to the engine for the client of this context.

        A request with a LoRA adapter is sent although its client has left, and then aborted. SGLang
        counts the adapter for all choices of a request at once, and would wait for ever to unload
        the adapter if one choice was not sent.

        Raises:
            ValueError: the client has left, and the request has no adapter.
        """
        call, rid = _CALL.get(), tokenized.rid
        if call is None:
            return
        if not call.has_left:
            call.rids.append(rid)
        elif tokenized.lora_id is None:
            raise ValueError(f"request {rid} is not sent to the engine: its client has left")
        else:
            self._abort_once_sent(rid, self._manager.rid_to_state.get(rid))

    async def _watch(self, request: Any, call: _Call) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._leave(call)

    def _leave(self, call: _Call) -> None:
        if call.has_left:
            return
        call.has_left = True
        for rid in call.rids:
            self._manager.abort_request(rid)

    def _abort_once_sent(self, rid: str, state: Any) -> None:
        """Abort a request when the scheduler has it, unless it has ended; ``state`` is its own."""
        if state is None or self._manager.rid_to_state.get(rid) is not state:
            return
        if state.dispatched:
            self._manager.abort_request(rid)
        else:
            later = asyncio.get_running_loop().call_later
            later(_POLL_S, self._abort_once_sent, rid, state)
