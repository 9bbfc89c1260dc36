"""How the idle event loop waits for work."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

from sglang_coserve.srt.safepoint.inbox import Inbox

__all__ = ["Parking"]


class Parking(IdleSleeper):
    """SGLang's sleeper for ``--sleep-on-idle``, woken by the inbox instead of a socket.

    The idle loop always sleeps beside a monitor thread: spinning it would hold
    Python's lock most of the time, and the thread, which needs it to take a
    request in, would come late.
    """

    def __init__(self, inbox: Inbox, rpc_socket: Any) -> None:
        super().__init__(sockets=[inbox.wake_fd, rpc_socket])
        self._inbox = inbox

    def maybe_sleep(self) -> None:
        """Sleep until there is a message or a call, for a second at most."""
        super().maybe_sleep()
        self._inbox.clear_wake()
