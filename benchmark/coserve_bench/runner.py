"""Brings runs about: the right server, the targets, the loads, the record on the disk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common.failures import RunFailedError
from common.machine import describe_machine
from common.model import prepare_model
from common.results import claim_folder
from coserve_bench.machine_speed import SpeedLog
from coserve_bench.offline_lines import write_sample
from coserve_bench.one_run import Bench
from coserve_bench.online_load import OnlineLoad
from coserve_bench.online_requests import burst, online_requests
from coserve_bench.options import Options
from coserve_bench.plan import RunKey
from coserve_bench.run_record import RunRecord, read_record, write_record
from coserve_bench.slo import SloRule, targets_of
from coserve_bench.systems import BASELINE, SYSTEMS, System, server_flags
from sglang_coserve.demo.servers import make_server, module_of
from sglang_coserve.errors import ServerError, StartupError
from sglang_coserve.local_server import LocalServer
from sglang_coserve.metrics import SloTargets
from sglang_coserve.slo_search.machine import EngineMachine

__all__ = ["Runner"]

_CAPACITY_TIMEOUT_S = 300.0


class Runner:
    """Makes the record of a run, or finds it from an earlier command.

    At most one server runs at a time; it stays for the next run when that wants
    the same one. Call ``close`` at the end, whatever happened.
    """

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        """Prepare the folder and the model.

        Raises:
            ConfigError: the folder holds runs of other settings.
        """
        self._options = options
        self._say = say
        self._runs = options.out / "runs"
        self._logs = options.out / "logs"
        work = options.out / "work"
        for folder in (self._runs, self._logs, work):
            folder.mkdir(parents=True, exist_ok=True)
        claim_folder(options.out / "settings.json", options.of_measurement())
        say("making a model")
        self._model = prepare_model(options.model_path, work)
        self._machine = describe_machine()
        self._online = OnlineLoad()
        offline_file = options.offline.file or work / "offline.jsonl"
        self._bench = Bench(options, self._model, self._online, offline_file)
        if options.offline.file is None:
            write_sample(offline_file, options.offline, self._model.vocab_size, options.seed)
        self._capacity_file = options.out / "capacity.json"
        self._speeds = SpeedLog(options.out / "machine_speed.json")
        self._plan: tuple[System, tuple[str, ...]] | None = None
        self._server: LocalServer | None = None
        self._records: dict[RunKey, RunRecord] = {}

    @property
    def records(self) -> list[RunRecord]:
        """Every record made or found so far."""
        return list(self._records.values())

    @property
    def machine(self) -> dict[str, Any]:
        """What everything was measured on."""
        return self._machine

    @property
    def speeds(self) -> SpeedLog:
        """How fast the machine was before and after each run."""
        return self._speeds

    def find(self, key: RunKey) -> RunRecord | None:
        """Return the record of a run that is on the disk."""
        path = self._path(key)
        if key not in self._records and path.exists():
            self._records[key] = read_record(path)
        return self._records.get(key)

    @property
    def known_capacity_per_s(self) -> float | None:
        """The capacity, given or measured before; None when neither."""
        if self._options.capacity_per_s is not None:
            return self._options.capacity_per_s
        if self._capacity_file.exists():
            return float(json.loads(self._capacity_file.read_text())["requests_per_s"])
        return None

    async def capacity_per_s(self) -> float:
        """Return the online requests/s of a saturated server without offline load.

        Measured once: ``--capacity-requests`` arrive at the same time; their
        number over the time until the last one has finished, the better of two
        bursts, as the first finds a cold server.
        """
        if (known := self.known_capacity_per_s) is not None:
            return known
        self._say("measuring the capacity")
        rate = max([await self._measure_capacity() for _ in range(2)])
        self._capacity_file.write_text(json.dumps({"requests_per_s": rate}) + "\n")
        return rate

    async def run(self, key: RunKey) -> RunRecord:
        """Return the record of ``key``, from the disk where it is there.

        A run on a machine that was off its usual speed is made again, up to
        ``--speed-repeats`` times; the one closest to it counts.

        Raises:
            ServerError: this run gave no result.
            StartupError: the server did not start.
            ConfigError: a workload does not fit.
        """
        if found := self.find(key):
            return found
        system, targets = SYSTEMS[key.system], None
        if system.takes_slo:
            rule = next(rule for rule in self._options.rules if rule.name == key.slo)
            targets = self.targets(rule, key.load)
        rate_per_s = key.load * await self.capacity_per_s()
        requests = online_requests(
            self._options.online,
            rate_per_s,
            self._options.online_warmup_s + self._options.window_s,
            self._options.seed,
            self._model.max_context_tokens,
        )
        try:
            base_url = await self._serve(system, targets)
            assert self._plan is not None and self._server is not None
            limits = await asyncio.to_thread(EngineMachine.at, base_url)
            measured, speed = await self._speeds.run_at_usual_speed(
                partial(self._bench.measure, base_url, key, system, requests, self._say),
                self._server.suspended_process,
                tolerance=self._options.speed_tolerance,
                repeats=self._options.speed_repeats,
            )
        except (ServerError, StartupError):
            self.stop_server()  # What is left of its work would disturb the next run.
            raise
        record = RunRecord(
            key=key,
            targets=targets,
            window_s=self._options.window_s,
            online=measured.online.timelines,
            offline=measured.offline,
            provenance={
                "machine": self._machine,
                "server": [module_of(is_ours=system.is_ours), *self._plan[1]],
                "online_requests_per_s": rate_per_s,
                "seed": self._options.seed,
                "engine": limits.to_dict(),
            },
            speed=speed,
        )
        write_record(self._path(key), record)
        self._records[key] = record
        return record

    def targets(self, rule: SloRule, load: float) -> SloTargets:
        """Return the targets at a load, from the baseline's runs so far.

        Raises:
            RunFailedError: there is no such run.
        """
        runs = (record for record in self.records if record.key.system == BASELINE)
        targets = targets_of(rule, [run.online for run in runs if run.key.load == load])
        if targets is None:
            raise RunFailedError(f"no run of {BASELINE} at load {load:g} to take targets from")
        return targets

    def stop_server(self) -> None:
        """End the server that runs, if one does."""
        server, self._server, self._plan = self._server, None, None
        if server is not None:
            server.stop()

    async def close(self) -> None:
        """End every process."""
        self.stop_server()
        await self._online.close()

    def _path(self, key: RunKey) -> Path:
        return self._runs / f"{key.name}.json"

    async def _serve(self, system: System, targets: SloTargets | None) -> str:
        """Return the address of a server for ``system``, idle or just started."""
        common = ("--model-path", self._model.path, "--log-level", "warning")
        flags = server_flags(
            system,
            (*common, *self._options.server_flags),
            targets,
            self._options.latency_profile,
        )
        plan = (system, flags)
        if plan != self._plan or self._server is None:
            self.stop_server()
            self._say("starting the server")
            server = make_server(
                flags,
                is_ours=system.is_ours,
                log_path=self._logs / f"{system.name}.log",
                ready_timeout_s=self._options.ready_timeout_s,
            )
            self._plan, self._server = plan, server
            try:
                await asyncio.to_thread(server.start)
            except BaseException:
                self.stop_server()
                raise
        return self._server.base_url

    async def _measure_capacity(self) -> float:
        base_url = await self._serve(SYSTEMS[BASELINE], None)
        await self._bench.make_ready(base_url)
        options = self._options
        requests = burst(
            options.online, options.capacity_requests, options.seed, self._model.max_context_tokens
        )
        await self._online.load(
            base_url,
            requests,
            vocab_size=self._model.vocab_size,
            seed=options.seed,
            body={},
        )
        result = await self._online.go(_CAPACITY_TIMEOUT_S)
        ends_s = [t.token_times_s[-1] for t in result.timelines if t.token_times_s]
        if not ends_s:
            raise RunFailedError("no request finished while the capacity was measured")
        return len(ends_s) / max(ends_s)
