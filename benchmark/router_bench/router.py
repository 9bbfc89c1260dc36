"""A router as a child process: ``smg`` or ``sglang-router``, from wherever it is installed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx

from sglang_coserve.errors import StartupError
from sglang_coserve.local_server import free_port

__all__ = ["Router"]

_READY_S: Final = 60.0
_POLL_S: Final = 0.2
_GRACE_S: Final = 10.0


class Router:
    """A context: entered once the router sees all workers healthy, left with its process ended."""

    def __init__(
        self, program: Path, policy: str, workers: Sequence[str], log_path: Path, *flags: str
    ) -> None:
        """Nothing is started yet.

        Args:
            program: The command, which has a subcommand ``launch``.
            policy: Of ``--policy``.
            workers: Base URLs.
            log_path: Where its output goes.
            flags: Others.
        """
        self._port = free_port()
        self.base_url = f"http://127.0.0.1:{self._port}"
        self._workers = workers
        self._log_path = log_path
        self._command = [
            *(str(program), "launch", "--worker-urls", *workers, "--policy", policy),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--prometheus-port", str(free_port()), *flags),
        ]

    def __enter__(self) -> Self:
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def num_healthy(self) -> int:
        """Return how many workers it would send requests to; 0 while it does not answer."""
        with contextlib.suppress(httpx.TransportError, ValueError):
            answer = httpx.get(f"{self.base_url}/workers", timeout=5.0)
            if answer.status_code == 200:
                return sum(bool(worker["is_healthy"]) for worker in answer.json()["workers"])
        return 0

    def _wait_until_ready(self) -> None:
        give_up_s = time.monotonic() + _READY_S
        while self.num_healthy() < len(self._workers):
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                log = self._log_path.read_text(errors="replace").splitlines()[-20:]
                raise StartupError("the router is not ready; its log ends with:\n" + "\n".join(log))
            time.sleep(_POLL_S)

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
