"""A gateway and its engines as processes, each of which can be hurt while the others go on."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import httpx
import psutil

from chaos_bench.figures import READY_TIMEOUT_S, Interval
from sglang_coserve.errors import StartupError
from sglang_coserve.local_server import LocalServer

_KEY: Final = "the engines' admin key"
_END_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.2
_REJOIN_S: Final = 5.0
"""Within it a router sends requests to an engine that is up again."""

_FROZEN_S: Final = 25.0
"""Longer than a gateway listens to an engine that says nothing."""


class FleetProcesses:
    """``count`` engines and a gateway before them. A context manager."""

    def __init__(
        self,
        count: int,
        engine_flags: Sequence[str],
        directory: Path,
        *,
        spares_one: bool,
        seed: int,
    ) -> None:
        """Nothing is started yet.

        Args:
            count: Engines.
            engine_flags: Of each of them.
            directory: Where logs and the gateway's data go.
            spares_one: Never hurt all engines at a time, as a router must have one to send to.
            seed: Of which engine is hurt.
        """
        self._rng = random.Random(seed)
        self._engines = [
            LocalServer(
                # A router sends a completion to who serves its model.
                [*engine_flags, "--admin-api-key", _KEY, "--served-model-name", "default"],
                log_path=directory / f"engine-{number}.log",
                ready_timeout_s=READY_TIMEOUT_S,
                extra_env={"OMP_NUM_THREADS": "1"},  # Several share the cores.
            )
            for number in range(count)
        ]
        urls = [flag for engine in self._engines for flag in ("--engine", engine.base_url)]
        self._gateway = LocalServer(
            ["--coserve-data-dir", str(directory / "data"), *urls],
            log_path=directory / "gateway.log",
            module="sglang_coserve.fleet",
            ready_timeout_s=READY_TIMEOUT_S,
            extra_env={"COSERVE_ENGINE_ADMIN_KEY": _KEY},
        )
        self.base_url = self._gateway.base_url
        self._restarts: list[threading.Thread] = []
        self._spared = 1 if spares_one else 0
        self._hurt: set[LocalServer] = set()
        self._is_ending = False
        self.injuries: dict[str, int] = dict.fromkeys(INJURIES, 0)
        self.attempts: dict[str, int] = {"moved": 0, "lost": 0, "given_up": 0}
        """That ended without an answer, as far as a gateway lived to tell."""

        self.drains_s: list[float] = []
        """From SIGTERM to the end of the process."""

        self.kills: list[Interval] = []
        """From a kill of anything of an engine to the end of its server."""

        self.failures: list[str] = []
        """Engines that did not end or start again as they should."""

    @property
    def engine_urls(self) -> list[str]:
        """Where the engines are."""
        return [engine.base_url for engine in self._engines]

    def __enter__(self) -> Self:
        try:
            starts = [threading.Thread(target=self._start, args=(e,)) for e in self._engines]
            for start in starts:
                start.start()
            for start in starts:
                start.join()
            if self.failures:
                raise StartupError("; ".join(self.failures))
            self._gateway.start()
        except BaseException:
            self._stop_all()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_all()

    def injure(self, name: str) -> bool:
        """Do what ``INJURIES`` has under ``name``; False when no engine is there to be hurt."""
        done = INJURIES[name](self)
        self.injuries[name] += done
        return done

    def wait_for_engines(self) -> None:
        """Wait until every engine that was hurt is up again."""
        for restart in self._restarts:
            restart.join()

    def note_attempts(self) -> None:
        """Add up what the gateway tells of attempts; it forgets that when it ends."""
        with suppress(httpx.HTTPError):
            answer = httpx.get(f"{self.base_url}/coserve/status", timeout=10.0, trust_env=False)
            fleet = answer.raise_for_status().json()["fleet"]
            for name in self.attempts:
                self.attempts[name] += fleet[f"lines_{name}"]

    def kill_gateway(self) -> bool:
        """End the gateway at once, and start another one."""
        self.note_attempts()
        self._gateway.kill()
        self._gateway.start()
        return True

    def kill_engine(self) -> bool:
        """End an engine at once; it is started again while the others go on."""

        def kill(engine: LocalServer) -> None:
            start_s = time.monotonic()
            engine.kill()
            self.kills.append(Interval(start_s, time.monotonic()))

        return self._hurt_engine(kill)

    def kill_scheduler(self) -> bool:
        """Let the scheduler of an engine die; its server has to notice and end."""

        def kill(engine: LocalServer) -> None:
            start_s = time.monotonic()
            for child in psutil.Process(engine.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if any("sglang::scheduler" in part for part in child.cmdline()):
                        child.kill()
            give_up_s = time.monotonic() + _END_TIMEOUT_S
            while not engine.has_ended and not self._is_ending:
                if time.monotonic() > give_up_s:
                    self.failures.append(f"{engine.base_url} runs on without its scheduler")
                    engine.kill()
                time.sleep(_POLL_S)
            engine.stop()
            self.kills.append(Interval(start_s, time.monotonic()))

        return self._hurt_engine(kill)

    def drain_engine(self) -> bool:
        """Stop an engine with SIGTERM, which it must obey in order, and start it again."""
        return self._hurt_engine(self._drain)

    def restart_all(self) -> bool:
        """Drain the engines one after the other, each once all others are up."""
        for engine in self._engines:
            self.wait_for_engines()
            self._begin_to_hurt(engine, self._drain).join()
        return True

    def freeze_engine(self) -> bool:
        """Stop all processes of an engine for a while."""

        def freeze(engine: LocalServer) -> None:
            try:
                os.killpg(engine.pid, signal.SIGSTOP)
                time.sleep(_FROZEN_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(engine.pid, signal.SIGCONT)

        return self._hurt_engine(freeze)

    def _hurt_engine(self, hurt: Callable[[LocalServer], None]) -> bool:
        well = [engine for engine in self._engines if engine not in self._hurt]
        if len(well) <= self._spared:
            return False
        self._begin_to_hurt(self._rng.choice(well), hurt)
        return True

    def _begin_to_hurt(
        self, engine: LocalServer, hurt: Callable[[LocalServer], None]
    ) -> threading.Thread:
        self._hurt.add(engine)
        restart = threading.Thread(target=self._hurt_and_restart, args=(engine, hurt))
        restart.start()
        self._restarts.append(restart)
        return restart

    def _drain(self, engine: LocalServer) -> None:
        group = psutil.Process(engine.pid)
        processes = [group, *group.children(recursive=True)]
        began_s = time.monotonic()
        os.kill(engine.pid, signal.SIGTERM)
        status = engine.wait(_END_TIMEOUT_S)
        self.drains_s.append(time.monotonic() - began_s)
        left = [process for process in processes if _runs(process)]
        if (status != 0 or left) and not self._is_ending:
            self.failures.append(
                f"{engine.base_url} ended with status {status} after SIGTERM,"
                f" and left {len(left)} processes"
            )
        engine.stop()

    def _hurt_and_restart(self, engine: LocalServer, hurt: Callable[[LocalServer], None]) -> None:
        with suppress(StartupError, ProcessLookupError):
            hurt(engine)
        if engine.has_ended and not self._is_ending:
            self._start(engine)
            if self._spared:
                time.sleep(_REJOIN_S)
        self._hurt.discard(engine)

    def _start(self, engine: LocalServer) -> None:
        try:
            engine.start()
        except (StartupError, OSError) as error:
            if not self._is_ending:
                self.failures.append(str(error))

    def _stop_all(self) -> None:
        self._is_ending = True
        self._gateway.stop()
        for engine in self._engines:
            with suppress(AssertionError, ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
            engine.stop()
        self.wait_for_engines()


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


INJURIES: Final[dict[str, Callable[[FleetProcesses], bool]]] = {
    "kill -9 of an engine": FleetProcesses.kill_engine,
    "kill -9 of the gateway": FleetProcesses.kill_gateway,
    "kill -9 of a scheduler": FleetProcesses.kill_scheduler,
    "drain of an engine": FleetProcesses.drain_engine,
    "SIGSTOP of an engine": FleetProcesses.freeze_engine,
    "rolling restart": FleetProcesses.restart_all,
}
