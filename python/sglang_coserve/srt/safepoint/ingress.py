"""Receives requests in a thread, also during a forward pass, for schedulers with safepoints.

The thread queues messages for the event loop, and asks the running batch to stop when an online
request arrives.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import zmq
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper
from sglang.srt.managers.utils import is_health_check_generate_req

from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt.marks.request_marks import arrival_s, is_offline, targets_of
from sglang_coserve.srt.safepoint.gates import PreemptionFlag

logger = logging.getLogger(__name__)


class Inbox:
    """A queue that replaces SGLang's socket from its tokenizer, with the same reading methods.

    One thread puts messages in, the event loop takes them out. ``wake_fd`` becomes
    readable with every message, so that an idle loop can sleep on it; a message
    that arrives before the loop sleeps prevents the sleep.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: deque[tuple[Any, tuple[RequestInfo, ...]]] = deque()
        self._error: BaseException | None = None
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, message: Any, arrivals: tuple[RequestInfo, ...] = ()) -> None:
        """Add a message, with the online requests that it contains."""
        with self._lock:
            self._messages.append((message, arrivals))
        os.eventfd_write(self.wake_fd, 1)

    def fail(self, error: BaseException) -> None:
        """Make the event loop fail with this error after it has taken all messages."""
        with self._lock:
            self._error = error
        os.eventfd_write(self.wake_fd, 1)

    def arrivals(self) -> list[RequestInfo]:
        """Return the online requests that the event loop has not taken yet."""
        with self._lock:
            return [arrival for _, arrivals in self._messages for arrival in arrivals]

    def clear_wake(self) -> None:
        """Reset ``wake_fd`` until the next message."""
        with suppress(BlockingIOError):  # It may be reset already, if the sleep timed out.
            os.eventfd_read(self.wake_fd)

    def recv_pyobj(self, flags: int = 0) -> Any:
        """Take the next message, as ``zmq.Socket.recv_pyobj`` does without blocking.

        Raises:
            zmq.Again: there is none.
            RuntimeError: the thread that receives has failed.
        """
        return self._take(flags)

    def recv(self, flags: int = 0) -> Any:
        """Take the next message, undecoded; see ``recv_pyobj``."""
        return self._take(flags)

    def _take(self, flags: int) -> Any:
        assert flags & zmq.NOBLOCK, "the event loop never blocks here"
        with self._lock:
            if self._messages:
                return self._messages.popleft()[0]
            if self._error is not None:
                raise RuntimeError("the thread that receives requests has failed") from self._error
        raise zmq.Again()

    def close(self) -> None:
        """Close the file descriptor; no message may be added afterwards."""
        os.close(self.wake_fd)


@dataclass(frozen=True, slots=True)
class StopRequest:
    """The arrivals for which the flag was raised, and when."""

    arrivals: tuple[RequestInfo, ...]
    raised_s: float


MustStop = Callable[[Sequence[RequestInfo], float], bool]
"""Says whether a batch is to stop for the online requests that wait at a time (of
``time.perf_counter``); called in any thread."""


class ArrivalWatch:
    """Raises the flag when there are both an open batch and an arrival for which it must stop.

    The event loop opens a batch and then checks for arrivals; the monitor thread puts
    an arrival into the inbox and then checks for an open batch. So at least one of the two
    threads sees both, whatever the order.
    """

    def __init__(self, inbox: Inbox, flag: PreemptionFlag) -> None:
        self._inbox = inbox
        self._flag = flag
        # Makes checking and raising atomic: a late raise for a batch that has ended could
        # overwrite the flag of the next one.
        self._lock = threading.Lock()
        self._batch = 0
        """Id of the open batch in the flag; 0 if none is open."""

        self._must_stop: MustStop = lambda _arrivals, _now_s: True
        self._request: StopRequest | None = None

    def open(self, batch: int, must_stop: MustStop) -> None:
        """Let this batch be stopped by arrivals, including those already in the inbox."""
        with self._lock:
            self._flag.lower()
            self._request = None
            self._batch, self._must_stop = batch, must_stop
        self.consider()

    def close(self) -> StopRequest | None:
        """Close the batch, which has stopped or ended; return the request to stop it, if any."""
        with self._lock:
            self._batch = 0
            self._flag.lower()
            return self._request

    def consider(self) -> None:
        """Raise the flag if a batch is open that must stop for those who have arrived."""
        with self._lock:
            if not self._batch or self._request is not None:
                return
            arrivals, now_s = self._inbox.arrivals(), time.perf_counter()
            if arrivals and self._must_stop(arrivals, now_s):
                self._request = StopRequest(tuple(arrivals), now_s)
                self._flag.raise_for(self._batch)


_JOIN_S: Final = 10.0


def online_arrivals(message: Any, now_s: float) -> tuple[RequestInfo, ...]:
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


class Ingress:
    """The inbox that replaces SGLang's socket, the thread that fills it, and the idle loop's
    sleeper; exists on the rank that receives requests."""

    def __init__(self, socket: Any, rpc_socket: Any, inbox: Inbox, watch: ArrivalWatch) -> None:
        self.inbox = inbox
        self.parking = _InboxSleeper(inbox, rpc_socket)
        self._monitor = SocketMonitor(socket, inbox, watch.consider)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Receive requests in this context."""
        self._monitor.start()
        try:
            yield
        finally:
            self._monitor.stop()


class _InboxSleeper(IdleSleeper):
    """SGLang's sleeper for ``--sleep-on-idle``, woken by the inbox instead of a socket.

    With a monitor thread the idle loop must sleep: a spinning loop would hold
    Python's interpreter lock most of the time and delay the thread when it receives a
    request.
    """

    def __init__(self, inbox: Inbox, rpc_socket: Any) -> None:
        super().__init__(sockets=[inbox.wake_fd, rpc_socket])
        self._inbox = inbox

    def maybe_sleep(self) -> None:
        """Sleep until there is a message or an RPC, for at most a second."""
        super().maybe_sleep()
        self._inbox.clear_wake()
