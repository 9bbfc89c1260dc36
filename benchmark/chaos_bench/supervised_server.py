"""A server that is killed, stopped, frozen and starved of disk, and started again each time."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

import httpx
import psutil

from chaos_bench.figures import READY_TIMEOUT_S, ChaosError, Interval
from chaos_bench.torn_tails import DiskFaults
from sglang_coserve.errors import StartupError
from sglang_coserve.local_server import LocalServer, free_port

_FULL_DISK_BYTES: Final = 1 << 20
"""What a file may grow to while the disk is "full"; the database and the journals are larger."""

_FULL_DISK_S: Final = 4.0
_FAILING_SYNCS_S: Final = 4.0
_CALL_TIMEOUT_S: Final = 120.0
_FROZEN_S: Final = 2.0
_END_TIMEOUT_S: Final = 30.0
"""A server whose scheduler or detokenizer is gone must have ended by then."""

_POLL_S: Final = 0.05


class SupervisedServer:
    """Runs while it is entered, but for the outages that are asked for."""

    def __init__(self, flags: Sequence[str], data: Path, log: Path, seed: int) -> None:
        self.data = data
        self.outages: list[Interval] = []
        """When no answer was to be expected."""

        self.full_disk: list[Interval] = []
        """When uploads were to be refused."""

        self.injuries: dict[str, int] = dict.fromkeys(INJURIES, 0)
        self.unexpected_ends = 0
        """How often the server ended though nobody had asked for it."""

        self._log = log
        self._number_of_starts = 0
        self._rng = random.Random(seed)
        self._disk = DiskFaults(data, data.with_name("disk"), self._rng)
        self._model_path = flags[list(flags).index("--model-path") + 1]
        self._server = LocalServer(
            [*flags, "--coserve-data-dir", str(data)],
            log_path=log,
            port=free_port(),
            ready_timeout_s=READY_TIMEOUT_S,
            extra_env=self._disk.environment,
        )
        self.base_url = self._server.base_url
        self._start_s = 1.0

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop()
        self._keep_log()

    def injure(self, name: str) -> bool:
        """Do what ``INJURIES`` has under ``name``; afterwards the server is up again.

        True, since that can be done at any time.

        Raises:
            ChaosError: it did not end, or did not start again, in time.
        """
        self.restart_if_ended()
        self.injuries[name] += 1
        INJURIES[name](self)
        return True

    def restart_if_ended(self) -> None:
        """Start the server again where it has ended by itself."""
        if self._server.has_ended:
            self.unexpected_ends += 1
            with self._outage():
                self._server.stop()
                self._start()

    def kill_all(self) -> None:
        """End all processes at once, as a power failure does."""
        with self._outage():
            self._server.kill()
            self._start()

    def kill_starting(self) -> None:
        """The same twice, the second time before it is ready."""
        with self._outage():
            self._server.kill()
            killing = threading.Timer(self._rng.uniform(0.2, self._start_s), self._server.kill)
            killing.start()
            with suppress(StartupError):  # Killed before it was ready.
                self._server.start()
            killing.join()
            self._start()

    def terminate(self) -> None:
        """Stop it as an operator does."""
        with self._outage():
            self._server.stop()
            self._start()

    def kill_scheduler(self) -> None:
        """Let the engine die; the server has to notice and end."""
        self._kill_child("sglang::scheduler")

    def kill_detokenizer(self) -> None:
        """The same with the process that makes text of tokens."""
        self._kill_child("sglang::detokenizer")

    def freeze(self) -> None:
        """Stop all processes for a while, as a machine does that is suspended."""
        with self._outage():
            self._signal_group(signal.SIGSTOP)
            time.sleep(_FROZEN_S)
            self._signal_group(signal.SIGCONT)

    def fill_disk(self) -> None:
        """Let no file grow for a while."""
        start_s = time.monotonic()
        kind = resource.RLIMIT_FSIZE
        limits = (_FULL_DISK_BYTES, resource.RLIM_INFINITY)
        before = resource.prlimit(self._server.pid, kind, limits)
        time.sleep(_FULL_DISK_S)
        resource.prlimit(self._server.pid, kind, before)
        # Batches try again after a while; until then uploads may still be refused.
        self.full_disk.append(Interval(start_s, time.monotonic() + 1.0))

    def fail_syncs(self) -> None:
        """Let no file be synced for a while, and then lose the power, and with it what was not."""
        start_s = time.monotonic()
        self._disk.let_syncs_fail(True)
        time.sleep(_FAILING_SYNCS_S)
        with self._outage():
            self._server.kill()
            self._disk.let_syncs_fail(False)
            self._disk.tear()
            self._start()
        self.full_disk.append(Interval(start_s, time.monotonic() + 1.0))

    def fail_power(self) -> None:
        """End all processes and tear the tails off files that were not synced."""
        with self._outage():
            self._server.kill()
            self._disk.tear()
            self._start()

    def abort_all(self) -> None:
        """Let SGLang abort everything that runs and waits, as before an exchange of weights."""
        with self._outage():
            self._post("/pause_generation", mode="abort")
            self._post("/continue_generation")

    def update_weights(self) -> None:
        """Load the same weights twice in a row, in the midst of all requests."""
        with self._outage():
            for _ in range(2):
                self._post("/update_weights_from_disk", model_path=self._model_path)

    def _post(self, path: str, **body: str) -> None:
        with httpx.Client(trust_env=False, timeout=_CALL_TIMEOUT_S) as client:
            try:
                client.post(f"{self.base_url}{path}", json=body).raise_for_status()
            except httpx.HTTPError as error:
                raise ChaosError(f"POST {path}: {error}") from error

    def _kill_child(self, name: str) -> None:
        with self._outage():
            for child in psutil.Process(self._server.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if any(name in part for part in child.cmdline()):
                        child.kill()
            give_up_s = time.monotonic() + _END_TIMEOUT_S
            while not self._server.has_ended:
                if time.monotonic() > give_up_s:
                    raise ChaosError(
                        f"the server still runs {_END_TIMEOUT_S:.0f} s after {name} was killed"
                    )
                time.sleep(_POLL_S)
            self._server.stop()
            self._start()

    def _start(self) -> None:
        self._keep_log()
        began_s = time.monotonic()
        self._server.start()
        self._start_s = time.monotonic() - began_s
        self._number_of_starts += 1

    def _keep_log(self) -> None:
        """Each start writes its own log; the earlier ones tell why a server ended."""
        if self._log.exists():
            self._log.rename(self._log.with_suffix(f".{self._number_of_starts}.log"))

    @contextmanager
    def _outage(self) -> Generator[None]:
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.outages.append(Interval(start_s, time.monotonic()))

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, number)


INJURIES: Final[dict[str, Callable[[SupervisedServer], None]]] = {
    "kill -9": SupervisedServer.kill_all,
    "kill -9 while starting": SupervisedServer.kill_starting,
    "SIGTERM": SupervisedServer.terminate,
    "kill -9 of the scheduler": SupervisedServer.kill_scheduler,
    "kill -9 of the detokenizer": SupervisedServer.kill_detokenizer,
    "SIGSTOP": SupervisedServer.freeze,
    "full disk": SupervisedServer.fill_disk,
    "failing syncs": SupervisedServer.fail_syncs,
    "power failure": SupervisedServer.fail_power,
    "abort of all requests": SupervisedServer.abort_all,
    "two updates of the weights": SupervisedServer.update_weights,
}
"""Everything that is done to a server, by name."""
