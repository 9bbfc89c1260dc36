"""The thread that receives requests, also during a forward pass."""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import zmq
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.utils import is_health_check_generate_req

from sglang_coserve.srt.marks.request_marks import arrival_s, is_offline
from sglang_coserve.srt.safepoint.inbox import Arrival, Inbox

__all__ = ["SocketMonitor", "online_arrivals"]

_JOIN_S: Final = 10.0

logger = logging.getLogger(__name__)


def online_arrivals(message: Any, now_s: float) -> tuple[Arrival, ...]:
    """Return the online requests in a message from SGLang's tokenizer, received just now."""
    requests = getattr(message, "batch", None) or (message,)
    return tuple(
        Arrival(request.rid, arrival_s(request, now_s))
        for request in requests
        if isinstance(request, TokenizedGenerateReqInput)
        and not is_offline(request)
        and not is_health_check_generate_req(request)
    )


class SocketMonitor:
    """Receives messages from a socket into an inbox, then reports online requests.

    In that order, so that an arrival is in the inbox when ``on_arrival`` is called.
    The monitor owns the socket while it runs. An error ends the thread and, through the inbox,
    the event loop.
    """

    def __init__(self, socket: zmq.Socket[bytes], inbox: Inbox, on_arrival: Callable[[], None]):
        self._socket = socket
        self._inbox = inbox
        self._on_arrival = on_arrival
        self._thread: threading.Thread | None = None
        self._stop_fd = -1

    def start(self) -> None:
        """Start the thread."""
        assert self._thread is None
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="coserve-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; messages received so far are in the inbox. May be started again."""
        if self._thread is None:
            return
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():  # It is a daemon and ends with the process.
            logger.warning("the thread that receives requests did not stop in %.0f s", _JOIN_S)
            return
        os.close(self._stop_fd)
        self._thread = None

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._stop_fd, zmq.POLLIN)
            while True:
                ready = dict(poller.poll())
                if self._stop_fd in ready:
                    return
                self._receive_all()
        except BaseException as error:
            logger.exception("the thread that receives requests has failed")
            self._inbox.fail(error)

    def _receive_all(self) -> None:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            now_s = time.perf_counter()
            # The inbox gets what SGLang's receiver would read from the socket.
            if io_struct._USE_PICKLE_IPC:
                message = payload = pickle.loads(data)
            else:
                message, payload = io_struct.msgpack_decode(data), data
            arrivals = online_arrivals(message, now_s)
            self._inbox.put(payload, arrivals)
            if arrivals:
                self._on_arrival()
