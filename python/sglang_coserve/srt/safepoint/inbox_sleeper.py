"""Lets the idle event loop sleep until a message arrives."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

from sglang_coserve.srt.safepoint.inbox import Inbox

__all__ = ["InboxSleeper"]


class InboxSleeper(IdleSleeper):
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
