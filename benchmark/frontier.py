"""Ours and stock SGLang's policy in the simulator: the loads of ``bench_emulated`` in minutes.

    python benchmark/frontier.py --traces TRACES --out benchmark/results/simulated/8b
    python benchmark/frontier.py --report benchmark/results/simulated/8b

The production core plans, a model of the engine runs the plans: see docs/simulator.md. Figures are
simulated. Stock SGLang with mixed chunks and priorities is the policy ``sarathi``, which is better
than stock in first tokens, since online prompts go before offline ones that have begun. Files,
tables and options are the same as in ``bench_emulated``; stored runs are not made again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emulated_bench.campaign import Campaign, Progress, Run
from emulated_bench.cases import Case
from emulated_bench.contenders import Contender
from emulated_bench.options import campaign_parser, run_command
from emulated_bench.simulation import is_simulated, simulated_row
from sglang_coserve.metrics import SloTargets
from sglang_coserve.srt.emulation.settings import Emulation
from sglang_coserve.terminal import terminate_as_interrupt


@dataclass(frozen=True, slots=True)
class Job:
    """Arguments of a run, for a process."""

    place: int
    """Place of the run."""

    emulation: Emulation
    case: Case
    contender: Contender
    repeat: int
    of_alone: SloTargets

    def run(self) -> tuple[int, dict[str, Any]]:
        """Return the place and the figures."""
        made = (self.emulation, self.case, self.contender, self.repeat, self.of_alone)
        return self.place, simulated_row(*made)


def main() -> int:
    """Do what the command line says, and return the exit status."""
    parser = campaign_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    return run_command(parser.parse_args(), measure)


def measure(options: argparse.Namespace) -> int:
    """Make the runs that are missing."""
    campaign = Campaign.of(options, kind="simulated")
    runs = [run for run in campaign.missing() if is_simulated(run.contender)]
    progress = Progress(campaign, runs)
    context = multiprocessing.get_context("spawn")
    with terminate_as_interrupt(), context.Pool(options.jobs, _ignore_interrupts) as pool:
        # The targets of some runs come from online requests alone.
        for part in ([r for r in runs if r.is_alone], [r for r in runs if not r.is_alone]):
            for place, figures in pool.imap_unordered(Job.run, jobs_of(campaign, part)):
                progress.store(part[place], figures)
    return campaign.end([])


def jobs_of(campaign: Campaign, runs: Sequence[Run]) -> list[Job]:
    """Return the arguments of runs."""
    return [
        Job(
            place,
            campaign.emulation,
            run.case,
            run.contender,
            run.repeat,
            run.of_alone() or SloTargets(),
        )
        for place, run in enumerate(runs)
    ]


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The command ends its processes itself.


if __name__ == "__main__":
    sys.exit(main())
