"""What has come for the scheduler while it runs a forward pass.

SGLang's event loop reads its socket between two passes. A batch that may be suspended asks at its
safepoints who has arrived, so messages are received there, and kept until the loop reads them.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from typing import Any

import zmq
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.utils import is_health_check_generate_req

from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt.marks.request_marks import arrival_s, is_offline, targets_of


class Inbox:
    """Takes the place of SGLang's socket from its tokenizer, with the same reading methods.

    For the rank that receives requests; all calls are the event loop's.
    """

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._messages: deque[tuple[Any, tuple[RequestInfo, ...]]] = deque()
        """Those that have been looked at and not read, as they will be, each with the online
        requests in it."""

    def arrivals(self) -> list[RequestInfo]:
        """Receive what has come; return the online requests that the event loop has not read."""
        # Cheaper than an exception at each safepoint where nothing has come.
        while self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            data = self._socket.recv(zmq.NOBLOCK)
            if io_struct._USE_PICKLE_IPC:
                message = payload = pickle.loads(data)
            else:
                # The event loop refuses what cannot be decoded.
                message, payload = _decoded(data), data
            self._messages.append((payload, _online_arrivals(message, time.perf_counter())))
        return [arrival for _, arrivals in self._messages for arrival in arrivals]

    def recv_pyobj(self, flags: int = 0) -> Any:
        """Read the next message, as ``zmq.Socket.recv_pyobj`` does."""
        return self._messages.popleft()[0] if self._messages else self._socket.recv_pyobj(flags)

    def recv(self, flags: int = 0) -> Any:
        """Read the next message, undecoded."""
        return self._messages.popleft()[0] if self._messages else self._socket.recv(flags)


def _decoded(data: bytes) -> Any:
    try:
        return io_struct.msgpack_decode(data)
    except Exception:
        return None


def _online_arrivals(message: Any, now_s: float) -> tuple[RequestInfo, ...]:
    """Return the online requests in a message from SGLang's tokenizer, received just now."""
    requests = getattr(message, "batch", None) or (message,)
    return tuple(
        RequestInfo(
            rid=request.rid,
            request_class=RequestClass.ONLINE,
            prompt_tokens=len(request.input_ids or request.input_embeds or ()),
            max_new_tokens=request.sampling_params.max_new_tokens or 0,
            arrival_s=arrival_s(request, now_s),
            ttft_target_s=targets_of(request)[0],
        )
        for request in requests
        if isinstance(request, TokenizedGenerateReqInput)
        and not is_offline(request)
        and not is_health_check_generate_req(request)
    )
