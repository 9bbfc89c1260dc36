"""A folder of figures, and the runs that it has none of yet."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from common.machine import commit
from common.results import claim_folder, settings_of
from emulated_bench.cases import Case, cases_of
from emulated_bench.contenders import PLAIN, Contender, contenders
from emulated_bench.stored import StoredLoad
from sglang_coserve.metrics import SloTargets
from sglang_coserve.srt.emulation.settings import Emulation

Row = dict[str, Any]
_SHARED: Final = (
    *("seconds", "offline", "in_flight", "chats", "at_once", "model", "hardware", "tp"),
)
"""Options that all files of a folder share; loads, seeds and systems are added later."""

_START_S: Final = 15.0
"""Seconds of a load that take about as long as the start of an engine."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: a system, under a load with the requests of a seed."""

    case: Case
    load: StoredLoad
    contender: Contender
    repeat: int

    @property
    def text(self) -> str:
        """Name for people."""
        return f"{self.case.name}: {self.contender.name}, seed {self.repeat}"

    @property
    def is_alone(self) -> bool:
        """True for online requests alone."""
        return self.contender.name == PLAIN

    def of_alone(self) -> SloTargets | None:
        """Return the targets of ``OF_ALONE``; None while the runs that give them are missing."""
        return self.load.targets_of_alone(self.repeat)


@dataclass(frozen=True, slots=True)
class Campaign:
    """The loads of a folder, and the systems of a command."""

    options: Namespace
    emulation: Emulation
    cases: Sequence[Case]
    loads: Sequence[StoredLoad]
    """For each case its figures so far."""

    systems: Mapping[str, Contender]

    @classmethod
    def of(cls, options: Namespace, *, kind: str, shared: Sequence[str] = ()) -> Self:
        """Open a folder for the figures of a command.

        Args:
            options: Command line.
            kind: What figures are, in one word.
            shared: Further options that all files of the folder share.

        Raises:
            ConfigError: the folder has figures of other settings, or a name is unknown.
        """
        emulation = Emulation.of(options.model, options.hardware, tp_size=options.tp)
        settings = settings_of(options)
        given = {name: settings[name] for name in (*_SHARED, *shared)}
        claim_folder(options.out / "settings.json", {"kind": kind, **given})
        cases = list(cases_of(options, emulation))
        devices = f"{options.tp} × {emulation.hardware}" if options.tp > 1 else emulation.hardware
        device = f"{emulation.model} on {devices}"
        heads = [{"kind": kind, "device": device, **case.head} for case in cases]
        loads = [
            StoredLoad.opened(options.out / case.file_name, head)
            for case, head in zip(cases, heads, strict=True)
        ]
        campaign = cls(
            options, emulation, cases, loads, contenders(options.systems, options.chunks)
        )
        campaign._forget()
        return campaign

    def missing(self) -> list[Run]:
        """Return the runs without figures, load by load; online requests alone come first."""
        runs = [
            Run(case, load, contender, repeat)
            for case, load in zip(self.cases, self.loads, strict=True)
            for contender in self.systems.values()
            for repeat in range(self.options.repeats)
            if not load.has(contender.name, repeat)
        ]
        print(f"{len(runs)} runs of {len(self.cases)} loads are missing", file=sys.stderr)
        return runs

    def end(self, failed: Sequence[str]) -> int:
        """Say which runs failed, and return the exit status."""
        for text in failed:
            print(f"failed: {text}", file=sys.stderr)
        return 1 if failed else 0

    def _forget(self) -> None:
        """Remove the rows of the groups that shall be run anew."""
        groups = self.options.forget
        known = contenders(groups, self.options.chunks)
        names = [name for name, one in known.items() if one.group in groups]
        for load in self.loads:
            if count := load.forget(names):
                load.write(self.options)
                print(f"{load.path}: {count} runs removed", file=sys.stderr)


def run_missing(
    campaign: Campaign, runs: Sequence[Run], figures: Callable[[Run, SloTargets], Row]
) -> list[str]:
    """Make runs one after the other, store each at once, and return the names of failed runs.

    A failed run is reported and has no figures, so the same command makes the run again. Runs
    beside offline work fail without the figures of online requests alone, which give some targets.

    Args:
        campaign: Their folder.
        runs: In this order.
        figures: Returns the row of a run with the targets of ``OF_ALONE``. Raises SystemExit
            where it fails.
    """
    failed: list[str] = []
    progress = Progress(campaign, runs)
    for run in runs:
        of_alone = SloTargets() if run.is_alone else run.of_alone()
        if of_alone is None:
            failed.append(progress.failed(run, "online requests alone have no figures"))
            continue
        try:
            found = figures(run, of_alone)
        except SystemExit as error:
            failed.append(progress.failed(run, str(error)))
        else:
            progress.store(run, found)
    return failed


class Progress:
    """Stores runs as they end; says how many are done, and about how long the others take."""

    def __init__(self, campaign: Campaign, runs: Sequence[Run]) -> None:
        """Start the clock."""
        self._options = campaign.options
        self._commit = commit()
        self._num_runs = len(runs)
        self._num_done = 0
        self._all_s = sum(map(_cost_s, runs))
        self._done_s = 0.0
        self._begin_s = time.monotonic()

    def store(self, run: Run, figures: Row) -> None:
        """Add a row to the file of its load."""
        head = {"system": run.contender.name, "repeat": run.repeat, "commit": self._commit}
        run.load.add({**head, **figures}, self._options)
        self._say(run, line_of(figures))

    def failed(self, run: Run, why: str) -> str:
        """Say that a run failed, and return its name."""
        self._say(run, f"failed: {why}")
        return run.text

    def _say(self, run: Run, text: str) -> None:
        self._num_done += 1
        self._done_s += _cost_s(run)
        minutes = (time.monotonic() - self._begin_s) * (self._all_s / self._done_s - 1) / 60
        head = f"[{self._num_done} of {self._num_runs}, {minutes:,.0f} min left]"
        print(f"{head} {run.text}: {text}", file=sys.stderr, flush=True)


def _cost_s(run: Run) -> float:
    """Return a number of seconds that the time of a run is proportional to."""
    return run.case.seconds + _START_S


def line_of(one: Mapping[str, Any]) -> str:
    """Return the most important figures of a row."""
    return (
        f"TTFT {one['ttft_p50_ms']:.0f}, {one['ttft_p99_ms']:.0f}, "
        f"gap {one['itl_p50_ms']:.1f}, {one['itl_p99_ms']:.1f}, "
        f"TPOT P99 {one['tpot_p99_ms']:.1f} ms, {one['offline_tokens_per_s']:,.0f} offline tokens/s"
    )
