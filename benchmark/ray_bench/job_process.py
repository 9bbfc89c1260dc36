"""A job with the Ray of its own, as processes that can be killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import psutil

from sglang_coserve.errors import ServerGoneError

__all__ = ["JobProcess"]

_END_TIMEOUT_S: Final = 60.0


class JobProcess:
    """The job on ``directory``, which can be started again. A context manager."""

    def __init__(
        self, directory: Path, engines: Sequence[str], *, admin_key: str, cpus: int
    ) -> None:
        self._command = [sys.executable, "-m", "ray_bench.job", str(directory), str(cpus), *engines]
        benchmark = str(Path(__file__).parents[1])
        path = os.pathsep.join([benchmark, os.environ.get("PYTHONPATH", "")])
        self._environment = {
            **os.environ,
            "PYTHONPATH": path,
            "COSERVE_ENGINE_ADMIN_KEY": admin_key,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._log = directory / "job.log"
        self._process: psutil.Popen | None = None
        self.num_starts = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_running:
            self.kill("driver")

    @property
    def is_running(self) -> bool:
        """True until the driver has ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the job, or go on with it."""
        with self._log.open("ab") as log:
            self._process = psutil.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        self.num_starts += 1

    def kill(self, name: str) -> bool:
        """Send SIGKILL to the ``driver`` or the ``raylet``, and end what is left of the job.

        False when it is not there.
        """
        if not self.is_running:
            return False
        assert self._process is not None
        children = self._process.children(recursive=True)
        victims = [self._process] if name == "driver" else _named(children, name)
        if not victims:
            return False
        victims[0].kill()
        # Without its raylet a driver ends by itself.
        self._process.wait(_END_TIMEOUT_S)
        _, left = psutil.wait_procs(children, timeout=_END_TIMEOUT_S)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=_END_TIMEOUT_S)
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait until the job is complete.

        Raises:
            ServerGoneError: it failed, or is not complete in time.
        """
        assert self._process is not None
        try:
            status = self._process.wait(timeout_s)
        except psutil.TimeoutExpired:
            message = f"the job is not complete after {timeout_s:g} s: {self._log}"
            raise ServerGoneError(message) from None
        if status:
            raise ServerGoneError(f"the job ended with status {status}: {self._log}")


def _named(processes: Sequence[psutil.Process], name: str) -> list[psutil.Process]:
    found = []
    for process in processes:
        try:
            if process.name() == name:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
