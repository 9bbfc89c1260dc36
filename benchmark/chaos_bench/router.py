"""A router as a child process: ``smg`` or ``sglang-router``, from wherever it is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx2

from sglang_coserve.local_server import ChildServer, free_port

COMMANDS: Final = {"smg": "COSERVE_SMG", "sglang-router": "COSERVE_SGLANG_ROUTER"}
"""Of the routers; a variable of the environment may say where one is."""

_READY_S: Final = 60.0


def router_command(name: str) -> Path | None:
    """Return where a router's command is, or None: by its variable, beside Python, on the PATH."""
    beside = str(Path(sys.executable).parent)
    path = os.environ.get(COMMANDS[name]) or shutil.which(name, path=beside) or shutil.which(name)
    return None if path is None else Path(path)


class Router(ChildServer):
    """A router, which is ready once it sees all workers healthy."""

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
        port = free_port()
        command = [
            *(str(program), "launch", "--worker-urls", *workers, "--policy", policy),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(free_port()), *flags),
        ]
        super().__init__(command, log_path=log_path, port=port, ready_timeout_s=_READY_S)
        self._num_workers = len(workers)

    def num_healthy(self) -> int:
        """Return how many workers it would send requests to; 0 while it does not answer."""
        with contextlib.suppress(httpx2.TransportError, ValueError):
            answer = httpx2.get(f"{self.base_url}/workers", timeout=5.0)
            if answer.status_code == 200:
                return sum(bool(worker["is_healthy"]) for worker in answer.json()["workers"])
        return 0

    def is_ready(self) -> bool:
        """See ``ChildServer``."""
        return self.num_healthy() >= self._num_workers
