"""Servers that are killed, stopped, frozen and starved of disk, and started again each time."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Self

import psutil

from chaos_bench.cut_proxy import CutProxies
from chaos_bench.figures import ChaosError, Interval
from chaos_bench.torn_tails import DiskFaults
from sglang_coserve import durable_files
from sglang_coserve.errors import StartupError
from sglang_coserve.local_server import LocalServer

ADMIN_KEY: Final = "the engines' admin key"
_READY_TIMEOUT_S: Final = 300.0
"""For a server that starts, on a machine with other work."""

SETTLE_S: Final = 1.0
"""After an outage of the only server: connections that broke are opened again."""

_REJOIN_S: Final = 5.0
"""Within it a router sends requests to an engine that is up again."""

Hurt = Callable[["Servers", LocalServer], float | None]
"""Does something to a server; returns since when requests fail, if any may."""


class Servers:
    """A server that keeps its batches itself, or engines behind a gateway that keeps them.

    A context manager. An engine of a fleet is hurt, and started again, while the others go on.
    """

    def __init__(
        self,
        flags: Sequence[str],
        work: Path,
        logs: Path,
        *,
        engines: int = 0,
        canary_model: Path | None = None,
        adapter: Path | None = None,
        spares_one: bool = False,
        seed: int = 0,
    ) -> None:
        """Nothing is started yet.

        Args:
            flags: Of the server, or of each engine.
            work: Where data go.
            logs: Where logs go, one of each start.
            engines: Of a fleet; 0: one server and no gateway.
            canary_model: Another model, which one more engine of the gateway has under the same
                name; no line is for it.
            adapter: The adapter that all engines of a fleet start with.
            spares_one: Never hurt all engines at a time, as a router must have one to send to.
            seed: Of what is hurt, and what is torn.
        """
        self.rng = random.Random(seed)
        self.disk = DiskFaults(work / "data", work / "disk", self.rng)
        self.pid_file = work / "pid"
        """Has the process id of the server, or of the gateway."""

        self._log_folder = logs
        self._logs: dict[LocalServer, Path] = {}
        self.is_fleet = engines > 0
        self.spared = 1 if spares_one else 0
        self.model_path = flags[list(flags).index("--model-path") + 1]
        keeps = ["--coserve-data-dir", str(work / "data")]
        self.adapter = adapter
        self.canaries: list[LocalServer] = []
        """Engines with another model; nothing is done to them."""

        self._stack = ExitStack()
        if self.is_fleet:
            few = {"OMP_NUM_THREADS": "1"}  # Several share the cores.
            flags = [*flags, "--admin-api-key", ADMIN_KEY]
            self.engines = [self._made(f"engine-{n}", flags, few) for n in range(engines)]
            if canary_model is not None:
                flags[flags.index("--model-path") + 1] = str(canary_model)
                self.canaries = [self._made("canary", flags, few)]
            self.proxies = CutProxies([engine.port for engine in self.engines])
            addresses = list(self._stack.enter_context(self.proxies).urls)
            addresses += [canary.base_url for canary in self.canaries]
            urls = [word for address in addresses for word in ("--engine", address)]
            environment = {"COSERVE_ENGINE_ADMIN_KEY": ADMIN_KEY}
            module = "sglang_coserve.fleet"
            self.keeper = self._made("gateway", [*keeps, *urls], environment, module=module)
        else:
            self.keeper = self._made("server", [*flags, *keeps], self.disk.environment)
            self.engines = [self.keeper]
        # Longer than a gateway listens to an engine that says nothing.
        self.frozen_s = 25.0 if self.is_fleet else 2.0
        # A server whose scheduler or detokenizer is gone must have ended by then.
        self.end_timeout_s = 60.0 if self.is_fleet else 30.0
        self.start_s = 1.0
        self._pool = ThreadPoolExecutor(max_workers=len(self.engines))
        self.being_hurt: dict[LocalServer, Future[None]] = {}
        self._is_ending = False
        self.injuries: Counter[str] = Counter()
        self.outages: list[Interval] = []
        """When requests may have failed: of a server from when it is hurt until it is up again, of
        an engine until it has ended."""

        self.gateway_outages: list[Interval] = []
        """When the gateway was down or started: calls of the Batch API may have failed."""

        self.full_disk: list[Interval] = []
        """When uploads were to be refused."""

        self.unexpected_ends = 0
        """How often a server ended though nobody had asked for it."""

        self.failures: list[str] = []
        """Servers that did not end or start again as they should."""

    def __enter__(self) -> Self:
        try:
            list(self._pool.map(self.start, [*self.engines, *self.canaries]))
            if self.is_fleet:
                self.start(self.keeper)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._is_ending = True
        self.keeper.stop()
        for engine in (*self.engines, *self.canaries):
            if not engine.has_ended:
                engine.kill()
        self._pool.shutdown()
        self._stack.close()
        for engine in self.engines:
            engine.stop()  # One that had begun to start.

    def injure(self, name: str, injury: Callable[[Servers], bool]) -> bool:
        """Do something, and count it by its name; False when no engine is there to be hurt.

        Raises:
            ChaosError: there is no server any more, or it does not answer.
        """
        self.restart_ended()
        done = injury(self)
        self.injuries[name] += done
        if self.keeper.has_ended:
            raise ChaosError("; ".join(self.failures))
        return done

    def restart_ended(self) -> None:
        """Start servers again that have ended by themselves."""
        for server in {*self._well(), *self.canaries, self.keeper}:
            if server.has_ended:
                self.unexpected_ends += 1
                self._hurt(server, lambda _servers, _server: time.monotonic())

    def hurt_one(self, hurt: Hurt) -> bool:
        """Hurt an engine, or the only server, which is waited for."""
        well = self._well()
        if len(well) <= self.spared:
            return False
        hurting = self.begin_to_hurt(self.rng.choice(well), hurt)
        if not self.is_fleet:
            hurting.result()
        return True

    def begin_to_hurt(self, server: LocalServer, hurt: Hurt) -> Future[None]:
        """Hurt a server in a thread, which starts it again where it has ended."""
        self.being_hurt[server] = self._pool.submit(self._hurt, server, hurt)
        return self.being_hurt[server]

    def start(self, server: LocalServer) -> None:
        """Start a server with a log of its own; the earlier ones tell why it ended.

        Raises:
            StartupError: it ended, or was not ready in time.
        """
        path = self._logs[server]
        if path.exists():
            number = sum(1 for _ in path.parent.glob(f"{path.stem}.*"))
            path.rename(path.with_suffix(f".{number}.log"))
        began_s = time.monotonic()
        server.start()
        self.start_s = time.monotonic() - began_s
        if server is self.keeper:
            # A probe reads the file at any time, and must not find it empty.
            pid = str(server.pid).encode()
            durable_files.replace(self.pid_file, lambda file: file.write(pid))

    def fail(self, reason: str) -> None:
        """Note that a server did not do what it should."""
        if not self._is_ending:
            self.failures.append(reason)

    def _made(
        self,
        name: str,
        flags: Sequence[str],
        environment: dict[str, str],
        module: str = "sglang_coserve.launch_server",
    ) -> LocalServer:
        path = self._log_folder / f"{name}.log"
        server = LocalServer(
            flags,
            log_path=path,
            module=module,
            ready_timeout_s=_READY_TIMEOUT_S,
            extra_env=environment,
        )
        self._logs[server] = path
        return server

    def _well(self) -> list[LocalServer]:
        hurt = {server for server, hurting in self.being_hurt.items() if not hurting.done()}
        return [engine for engine in self.engines if engine not in hurt]

    def _hurt(self, server: LocalServer, hurt: Hurt) -> None:
        began_s = None
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            began_s = hurt(self, server)
        end_s = time.monotonic()
        if server.has_ended and not self._is_ending:
            server.stop()
            try:
                self.start(server)
            except (StartupError, OSError) as error:
                self.fail(str(error))
            if self.spared:
                time.sleep(_REJOIN_S)
        if began_s is not None:
            until_s = end_s if self.is_fleet else time.monotonic() + SETTLE_S
            self.outages.append(Interval(began_s, until_s))
