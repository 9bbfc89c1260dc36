"""Receives requests in a thread, also during a forward pass, for schedulers with safepoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_coserve.srt.safepoint.arrival_watch import ArrivalWatch
from sglang_coserve.srt.safepoint.inbox import Inbox
from sglang_coserve.srt.safepoint.inbox_sleeper import InboxSleeper
from sglang_coserve.srt.safepoint.monitor import SocketMonitor

__all__ = ["Ingress"]


class Ingress:
    """The inbox that replaces SGLang's socket, the thread that fills it, and the idle loop's
    sleeper; exists on the rank that receives requests."""

    def __init__(self, socket: Any, rpc_socket: Any, inbox: Inbox, watch: ArrivalWatch) -> None:
        self.inbox = inbox
        self.parking = InboxSleeper(inbox, rpc_socket)
        self._monitor = SocketMonitor(socket, inbox, watch.consider)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Receive requests in this context."""
        self._monitor.start()
        try:
            yield
        finally:
            self._monitor.stop()
