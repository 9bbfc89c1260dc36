"""Receives requests in a thread, also during a forward pass, for schedulers with safepoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

from sglang_coserve.srt.safepoint.arrival_watch import ArrivalWatch
from sglang_coserve.srt.safepoint.inbox import Inbox
from sglang_coserve.srt.safepoint.monitor import SocketMonitor

__all__ = ["Ingress"]


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
