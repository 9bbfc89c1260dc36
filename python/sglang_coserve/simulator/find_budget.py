"""Finds the largest step budget that meets every SLO in simulation (HyGen §4.2)."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, Final

from sglang_coserve.core.control.slo import Slo, format_slo, parse_slo, request_targets
from sglang_coserve.core.policies.baselines import OnlineOnlyPolicy
from sglang_coserve.core.policies.coserve import CoservePolicy
from sglang_coserve.core.policies.hygen import HygenPolicy
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import LatencyReport, SloTargets, latency_report, milliseconds
from sglang_coserve.simulator.observer import RunControl
from sglang_coserve.simulator.options import SimulationOptions
from sglang_coserve.simulator.report import text_table
from sglang_coserve.simulator.result import LABEL
from sglang_coserve.simulator.run import Workload, simulate

_ALONE: Final = OnlineOnlyPolicy.name
_POLICIES: Final[Mapping[str, type[Policy]]] = MappingProxyType(
    {policy.name: policy for policy in (CoservePolicy, HygenPolicy)}
)
"""Policies that observe a step budget. No others are imported, so a change of another policy leaves
the results as they are."""

_HIGHEST: Final = 2.0
"""Highest budget to try, relative to the largest limit of the SLOs: a statistic allows some steps
to be longer than itself. Smaller limits do not count, since without running online requests they do
not bound a step."""

_LADDER_STEP: Final = 2.0
"""Least ratio between budgets of the ladder; larger if the ladder would need more than half of the
runs."""

_MAX_RUNS: Final = 16

_PRECISION: Final = 0.02
"""Ratio of two budgets, less 1, between which no other is tried."""


@dataclass(frozen=True, slots=True)
class SloResult:
    """The measured value of one SLO beside its limit."""

    slo: Slo
    limit_s: float
    measured_s: float | None
    """None if nothing was measured; the SLO then counts as met."""

    @property
    def is_met(self) -> bool:
        """True when the limit was not exceeded."""
        return self.measured_s is None or self.measured_s <= self.limit_s

    @property
    def excess(self) -> float:
        """measured / limit - 1: negative if the SLO is met, -1 without measurements."""
        return -1.0 if self.measured_s is None else self.measured_s / self.limit_s - 1

    def __str__(self) -> str:
        name = f"{self.slo.latency.value} {self.slo.statistic.value}"
        measured = "-" if self.measured_s is None else f"{self.measured_s * 1000:.3g}ms"
        return f"{name} {measured} {'<=' if self.is_met else '>'} {self.limit_s * 1000:.3g}ms"


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulated run, judged by the SLOs."""

    budget_s: float | None
    """Step budget of the run; None for online requests alone."""

    latency: LatencyReport
    """Of the online requests."""

    offline_tokens_per_s: float
    results: tuple[SloResult, ...]

    @property
    def is_met(self) -> bool:
        """True when every SLO was met."""
        return all(result.is_met for result in self.results)

    @property
    def excess(self) -> float:
        """measured / limit - 1 of the worst SLO; negative if all are met."""
        return max(result.excess for result in self.results)


class BudgetSearch:
    """Finds the budget; completed runs remain available when it ends early.

    A budget bounds online prefills as well, so a budget that is too small also misses TTFT
    targets: the SLOs may be met only in the middle of the range, which bisection of the whole
    range would miss. So budgets are first lowered step by step from the top, until one meets the
    SLOs. If none does, those on both sides of the best are tried. Then the range between the one
    that meets them and the next one above it is bisected.
    """

    def __init__(self, options: SimulationOptions, control: RunControl) -> None:
        """``control`` may end the search early.

        Raises:
            ConfigError: ``options`` name no SLO, no offline requests, or not one policy that
                takes a budget.
        """
        names = [name for name in options.policies if name != _ALONE]
        if len(names) != 1 or names[0] not in _POLICIES:
            raise ConfigError(
                f"--policy {options.policy}: a budget is found for one policy that takes one: "
                f"{' or '.join(_POLICIES)}"
            )
        if not options.slo:
            raise ConfigError("--find-budget needs --slo: without an SLO any budget would do")
        if options.offline == "none":
            raise ConfigError("--offline none: without offline requests no budget is needed")
        self._options = options
        self._control = control
        self._policy = names[0]
        self._slos = tuple(map(parse_slo, options.slo))
        self._trials: dict[float, Trial] = {}
        self.online_only: Trial | None = None
        """The run with online requests alone."""

        self.budget_s: float | None = None
        """The budget found."""

        self.is_limit = False
        """True if the largest budget tried met the SLOs, so a larger one might as well."""

        self.problem: str | None = None
        """Why there is no budget; None if there is one, or if the search ended early."""

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All runs with a budget so far, in order."""
        return tuple(self._trials.values())

    @property
    def least_budget_s(self) -> float:
        """The smallest useful budget: the time of an online decode and an offline chunk.

        Raises:
            ConfigError: the trace has no request in the simulated time.
        """
        online = self._options.online_trace()
        if not online:
            raise ConfigError("no online request to simulate: use a longer duration or rate")
        context_tokens = sum(request.prompt_tokens for request in online) // len(online)
        setup = self._options.setup(self._policy)
        chunk_tokens = setup.scheduler.min_chunk_tokens
        return setup.model.predict(StepStats.of([(chunk_tokens, 0)], [context_tokens]))

    def run(self) -> None:
        """Search in at most 16 runs and the one of online requests alone.

        Raises:
            CoserveError: a file cannot be used, or an SLO is a tolerance over a latency that
                online requests alone did not have.
        """
        with suppress(_EndedEarlyError):
            self._search(self._options.workload())

    def server_flags(self) -> list[str] | None:
        """Return the flags of a server with this budget, tolerances as limits; None without one."""
        if self.budget_s is None or self.online_only is None:
            return None
        profile, chunk_tokens = self._options.profile, self._options.step_prefill_tokens
        limits_s = [max(round(r.limit_s, 6), 1e-6) for r in self.online_only.results]
        slos = [
            format_slo(replace(slo, limit_s=limit_s, tolerance=None))
            for slo, limit_s in zip(self._slos, limits_s, strict=True)
        ]
        return [
            *("--offline-policy", self._policy),
            *(("--latency-profile", str(profile)) if profile else ()),
            *("--slo", *slos),
            *("--iteration-budget-ms", f"{self.budget_s * 1e3:.4g}"),
            *(("--step-prefill-tokens", str(chunk_tokens)) if chunk_tokens else ()),
        ]

    def to_text(self) -> str:
        """Return the table of all runs, the result, and the command line to serve with."""
        text = ""
        if (alone := self.online_only) is not None:
            columns = ("", "budget ms", *map(format_slo, self._slos), "met", "offline tok/s")
            runs = [(f"run {number}", trial) for number, trial in enumerate(self.trials, start=1)]
            rows = [("online only", alone), *runs]
            text = text_table(columns, [_cells(name, trial) for name, trial in rows])
        return f"{text}{self._verdict()}\n"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, the runs and the result for JSON; times are in milliseconds."""
        return {
            "label": LABEL,
            "settings": self._options.to_dict(),
            "budget_ms": milliseconds(self.budget_s),
            "is_limit": self.is_limit,
            "problem": self.problem,
            "serve": self._command(),
            "online_only": None if self.online_only is None else _to_dict(self.online_only),
            "runs": [_to_dict(trial) for trial in self.trials],
        }

    def _search(self, workload: Workload) -> None:
        self.online_only = alone = self._simulate(workload, _ALONE, SloTargets(), None)
        targets = request_targets(self._slos, alone.latency)

        def is_met(budget_s: float) -> bool:
            run = self._simulate(workload, self._policy, targets, budget_s)
            self._trials[budget_s] = run
            return run.is_met

        largest_limit_s = max(result.limit_s for result in alone.results)
        budgets_s = chain(self._ladder(largest_limit_s), self._beside_best())
        low_s = next(filter(is_met, budgets_s), None)
        if low_s is None:
            self.problem = self._nearest(alone)
            return
        high_s = min((each for each in self._trials if each > low_s), default=low_s)
        self.is_limit = high_s == low_s
        while high_s > low_s * (1 + _PRECISION) and len(self._trials) < _MAX_RUNS:
            middle_s = (low_s * high_s) ** 0.5
            if is_met(middle_s):
                low_s = middle_s
            else:
                high_s = middle_s
        self.budget_s = low_s

    def _ladder(self, largest_limit_s: float) -> list[float]:
        least_s = self.least_budget_s
        budget_s = max(_HIGHEST * largest_limit_s, least_s)
        step = max(_LADDER_STEP, (budget_s / least_s) ** (1 / (_MAX_RUNS // 2)))
        ladder = []
        # The factor avoids a budget that equals the last one but for rounding.
        while budget_s > least_s * 1.001:
            ladder.append(budget_s)
            budget_s /= step
        return [*ladder, least_s]

    def _beside_best(self) -> Iterator[float]:
        """Yield budgets between the best one so far and those next to it, the wider gap first."""
        while len(self._trials) < _MAX_RUNS:
            tried = sorted(self._trials)
            best = tried.index(min(tried, key=lambda each: self._trials[each].excess))
            gaps = pairwise(tried[max(best - 1, 0) : best + 2])
            low_s, high_s = max(gaps, key=lambda gap: gap[1] / gap[0], default=(1.0, 1.0))
            if high_s <= low_s * (1 + _PRECISION):
                return
            yield (low_s * high_s) ** 0.5

    def _simulate(
        self, workload: Workload, policy: str, targets: SloTargets, budget_s: float | None
    ) -> Trial:
        name = policy if budget_s is None else f"{policy}, {budget_s * 1e3:.3g} ms"
        setup = self._options.setup(policy)
        # As on the server, the scheduler has the SLOs as limits, and the budget.
        setup = replace(
            setup,
            slos=(),
            targets=targets,
            scheduler=replace(setup.scheduler, iteration_budget_s=budget_s),
        )
        self._control.begin(name, workload.interval_s)
        made = OnlineOnlyPolicy if policy == _ALONE else _POLICIES[policy]
        chosen = made(**self._options.policy_settings(policy))
        result = simulate(workload, setup, chosen, on_progress=self._control.tick)
        if self._control.should_stop:
            raise _EndedEarlyError
        latency = latency_report(result.online)
        alone = latency if self.online_only is None else self.online_only.latency
        results = [
            SloResult(slo, slo.limit_over(alone), slo.measured_s(latency)) for slo in self._slos
        ]
        offline = result.offline_throughput.total_tokens_per_s
        return Trial(budget_s, latency, offline, tuple(results))

    def _nearest(self, alone: Trial) -> str:
        best = min(self.trials, key=lambda trial: trial.excess)
        reached = f"meet them: {_values(alone)}"
        if not alone.is_met:
            reached = f"do not meet them either: {_values(alone)}"
        nearest = " ".join(
            f"'{format_slo(replace(r.slo, limit_s=_rounded_up_s(r.measured_s), tolerance=None))}'"
            for r in best.results
            if not r.is_met
        )
        assert best.budget_s is not None
        return (
            f"the best was {best.budget_s * 1e3:.4g} ms with {_values(best)}; online requests "
            f"alone {reached}. The nearest SLO that a run kept: {nearest}; or lower the online load"
        )

    def _verdict(self) -> str:
        if self.problem is not None:
            return f"no budget: {self.problem}"
        if self.budget_s is None:
            return "no budget: the search ended early"
        limit = ", the largest tried: the scheduler meets the SLOs without it"
        return (
            f"budget: {self.budget_s * 1e3:.4g} ms {LABEL}{limit if self.is_limit else ''}; "
            f"serve with\n  {self._command()}"
        )

    def _command(self) -> str | None:
        flags = self.server_flags()
        return None if flags is None else shlex.join(["coserve", "serve", *flags])


class _EndedEarlyError(Exception):
    """Ctrl-C, or the time limit."""


def _rounded_up_s(measured_s: float | None) -> float:
    """So that the run that it is taken from meets the SLO that is proposed."""
    return math.ceil((measured_s or 0.0) * 1e5) / 1e5


def _values(trial: Trial) -> str:
    return ", ".join(map(str, trial.results))


def _cells(name: str, trial: Trial) -> Sequence[str]:
    budget = "-" if trial.budget_s is None else f"{trial.budget_s * 1e3:.2f}"
    met = "yes" if trial.is_met else "no"
    return (name, budget, *map(_cell, trial.results), met, f"{trial.offline_tokens_per_s:,.0f}")


def _cell(result: SloResult) -> str:
    if result.measured_s is None:
        return "-"
    comparison = "<=" if result.is_met else ">"
    return f"{result.measured_s * 1e3:.1f} {comparison} {result.limit_s * 1e3:.1f} ms"


def _to_dict(trial: Trial) -> dict[str, Any]:
    return {
        "budget_ms": milliseconds(trial.budget_s),
        "is_met": trial.is_met,
        "slos": [
            {
                "slo": format_slo(result.slo),
                "limit_ms": milliseconds(result.limit_s),
                "value_ms": milliseconds(result.measured_s),
                "is_met": result.is_met,
            }
            for result in trial.results
        ],
        "offline_tokens_per_s": trial.offline_tokens_per_s,
        "online": trial.latency.to_dict(),
    }
