"""The two things this benchmark does: compare systems, and search OOCO's rate for each."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import RenderableType

from coserve_bench.options import Options
from coserve_bench.outputs import write_comparison, write_searches
from coserve_bench.plan import RunKey, plan_runs
from coserve_bench.rate_search import Probe, RateSearch
from coserve_bench.runner import Runner
from coserve_bench.systems import BASELINE, System
from sglang_coserve.errors import ServerError, StartupError
from sglang_coserve.metrics import SloTargets, violation_rate

__all__ = ["Comparison", "RateSearches", "Started"]

Started = Callable[[RunKey, int, int], None]
"""Is told each run with its place, from 0, and the number of runs, at most."""


class Comparison:
    """Every run of the plan."""

    def __init__(self, options: Options, runner: Runner) -> None:
        self._options = options
        self._runner = runner
        self.failed: dict[str, str] = {}
        """Runs that gave no result, by name, and why."""

    async def run(self, started: Started) -> None:
        """Make all runs. What a failed one costs is its own ratios.

        Raises:
            ServerError, StartupError: the capacity cannot be measured.
        """
        options = self._options
        await self._runner.capacity_per_s()
        plan = plan_runs(options.systems, options.loads, options.repeats, options.rules)
        for number, key in enumerate(plan):
            started(key, number, len(plan))
            try:
                await self._runner.run(key)
            except (ServerError, StartupError) as error:
                self.failed[key.name] = str(error)

    def report(self) -> RenderableType:
        """Write what came of the runs so far, and return it in short."""
        return write_comparison(self._options, self._runner)


class RateSearches:
    """The largest offline rate of every system with offline load, at one online load.

    All are judged by the targets of the first rule.
    """

    def __init__(self, options: Options, runner: Runner) -> None:
        self._options = options
        self._runner = runner
        self._searches: dict[str, RateSearch] = {}
        self.failed: dict[str, str] = {}
        """Runs that gave no result, by name, and why."""

    async def run(self, started: Started) -> None:
        """Make all runs. A failed one ends its system's search.

        Raises:
            ServerError, StartupError: in a run of the baseline, without which nothing goes.
        """
        options = self._options
        (load,) = options.loads
        systems = [system for system in options.systems if system.has_offline]
        total = options.repeats + options.ooco_runs * len(systems)
        for number in range(options.repeats):
            key = RunKey(number + 1, load, BASELINE)
            started(key, number, total)
            await self._runner.run(key)
        targets = self._runner.targets(options.rules[0], load)
        first_rate = options.ooco_first_rate_per_s or await self._runner.capacity_per_s() / 2
        for place, system in enumerate(systems):
            search = self._searches[system.name] = RateSearch(first_rate, options.ooco_runs)
            while (rate := search.next_rate()) is not None:
                key = self._key(system, load, rate)
                done = options.repeats + place * options.ooco_runs + len(search.probes)
                started(key, done, total)
                try:
                    search.record(await self._probe(key, rate, targets))
                except (ServerError, StartupError) as error:
                    self.failed[key.name] = str(error)
                    break

    def report(self) -> RenderableType:
        """Write what came of the runs so far, and return it in short."""
        return write_searches(self._options, self._runner, self._searches)

    def _key(self, system: System, load: float, rate_per_s: float) -> RunKey:
        slo = self._options.rules[0].name if system.takes_slo else ""
        return RunKey(1, load, system.name, slo, rate_per_s)

    async def _probe(self, key: RunKey, rate_per_s: float, targets: SloTargets) -> Probe:
        record = await self._runner.run(key)
        offline, violations = record.offline, violation_rate(record.online, targets)
        assert offline is not None and violations is not None
        return Probe(
            rate_per_s,
            violations,
            served_tokens_per_s=offline.throughput.total_tokens_per_s,
            is_saturated=2 * offline.finished < offline.sent,
        )
