"""The queue of received messages between the monitor thread and the event loop."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq

__all__ = ["Arrival", "Inbox"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """An online request that was received."""

    rid: str
    arrival_s: float
    """When the server received it, on this process's ``time.perf_counter``."""


class Inbox:
    """A queue that replaces SGLang's socket from its tokenizer, with the same reading methods.

    One thread puts messages in, the event loop takes them out. ``wake_fd`` becomes
    readable with every message, so that an idle loop can sleep on it; a message
    that arrives before the loop sleeps prevents the sleep.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: deque[tuple[Any, tuple[Arrival, ...]]] = deque()
        self._error: BaseException | None = None
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, message: Any, arrivals: tuple[Arrival, ...] = ()) -> None:
        """Add a message, with the online requests that it contains."""
        with self._lock:
            self._messages.append((message, arrivals))
        os.eventfd_write(self.wake_fd, 1)

    def fail(self, error: BaseException) -> None:
        """Make the event loop fail with this error after it has taken all messages."""
        with self._lock:
            self._error = error
        os.eventfd_write(self.wake_fd, 1)

    def arrivals(self) -> list[Arrival]:
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
