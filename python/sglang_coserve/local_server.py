"""Servers as child processes, for the demo, benchmarks and tests."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Self

import httpx2

from sglang_coserve.errors import StartupError

_POLL_S = 0.2
_GRACE_S = 15.0
_LOG_TAIL_LINES = 30
_PORTS = (20_000, 30_000)


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now.

    Not one of those that the system gives to whoever asks for any: a server takes a
    while until it listens, and its own sockets could be given the port meanwhile.

    Raises:
        StartupError: a hundred ports at random were all taken.
    """
    for _ in range(100):
        port = random.randrange(*_PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise StartupError(f"no free port found from {_PORTS[0]} to {_PORTS[1] - 1}")


class ChildServer(ABC):
    """Starts a program in a process group of its own and stops the whole group.

    A context manager: entering waits until the server is ready, leaving
    ends every process it started.

    Raises:
        StartupError: on entering, when the server ends or is not ready in time; the
            message holds the end of its log.
    """

    start_process: ClassVar[Callable[..., subprocess.Popen[bytes]]] = subprocess.Popen
    """How commands are started; takes what ``subprocess.Popen`` takes."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        port: int,
        ready_timeout_s: float,
        extra_env: dict[str, str] | None = None,
    ) -> None:
        """``command`` starts the server, which is to listen on ``port`` of the loopback."""
        self.port = port
        self.base_url = f"http://127.0.0.1:{port}"
        self._command = command
        self._log_path = log_path
        self._ready_timeout_s = ready_timeout_s
        self._env = {**os.environ, **(extra_env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        # A thread that is told to stop while another starts the server must see it.
        self._starting = threading.Lock()

    def __enter__(self) -> Self:
        self.start()
        return self

    @abstractmethod
    def is_ready(self) -> bool:
        """Ask the server, within seconds, whether it is ready.

        Raises:
            httpx2.TransportError: it does not answer.
        """

    def start(self) -> None:
        """Start the server and wait until it is ready; for use without ``with``."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._starting, self._log_path.open("wb") as log:
            self._process = self.start_process(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._env,
                # Its own group: a terminal's Ctrl-C reaches only us, and we can end all of it.
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the HTTP server, which leads the process group."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """True when the HTTP server's process has ended, or was never started."""
        return self._process is None or self._process.poll() is not None

    def wait(self, timeout_s: float) -> int | None:
        """Return the status that the HTTP server's process ends with; None if it goes on."""
        assert self._process is not None, "the server was not started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def stop(self) -> None:
        """End the server: ask, wait a while, then kill the whole group. Idempotent."""
        with self._starting:
            process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()  # The leader only: it ends its children in order.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill(self) -> None:
        """End all processes of the server at once, as a power failure does. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.stop()

    def log_tail(self) -> str:
        """Return the last lines the server wrote."""
        text = self._log_path.read_text(errors="replace") if self._log_path.exists() else ""
        return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._ready_timeout_s
        while time.monotonic() < deadline:
            status = self._process.poll()
            if status is not None:
                raise StartupError(
                    f"the server ended with status {status} before it was ready; "
                    f"its log ({self._log_path}) ends with:\n{self.log_tail()}"
                )
            with contextlib.suppress(httpx2.TransportError):
                if self.is_ready():
                    return
            time.sleep(_POLL_S)
        raise StartupError(
            f"the server was not ready after {self._ready_timeout_s:.0f} s; "
            f"its log ({self._log_path}) ends with:\n{self.log_tail()}"
        )


class LocalServer(ChildServer):
    """A server module of our own, which is ready when it answers ``/health``."""

    def __init__(
        self,
        flags: Sequence[str],
        *,
        log_path: Path,
        module: str = "sglang_coserve.launch_server",
        port: int | None = None,
        ready_timeout_s: float = 180.0,
        extra_env: dict[str, str] | None = None,
    ) -> None:
        port = free_port() if port is None else port
        super().__init__(
            [sys.executable, "-m", module, *flags, "--host", "127.0.0.1", "--port", str(port)],
            log_path=log_path,
            port=port,
            ready_timeout_s=ready_timeout_s,
            extra_env=extra_env,
        )

    def is_ready(self) -> bool:
        """See ``ChildServer``."""
        return httpx2.get(f"{self.base_url}/health", timeout=2.0).status_code == 200
