"""Ours and stock SGLang on an emulated GPU, beside traffic of published traces and of chats.

    python benchmark/bench_emulated.py --traces TRACES --out benchmark/results/emulated/8b
    python benchmark/bench_emulated.py --model llama-3.1-70b --tp 4 --traces TRACES --out …/70b
    python benchmark/bench_emulated.py --report benchmark/results/emulated/8b

Real schedulers run on a virtual clock, on which only the device's steps are modelled: see
docs/emulation.md, which says where the traces come from. Figures are emulated, never measured on a
GPU. A load of 1 is the rate at which requests end that all come at once, by the latency model.

Each load has a file in ``--out``, to which each run is added when it ends; stored runs are not made
again. So a command that was ended goes on where it was, and further systems, loads and seeds can be
run later. ``--report`` prints all tables. ``--effects`` runs the papers' headline
effects instead, each with its own loads, or a run of a GPU again:

    python benchmark/bench_emulated.py --host-factor 0 --effects bros --out …/effects
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any, Final

from common.results import write_results
from emulated_bench import effects
from emulated_bench.campaign import Campaign, Run, line_of, run_missing
from emulated_bench.contenders import PLAIN, pairs, targets_of_alone
from emulated_bench.effects import EFFECTS
from emulated_bench.figures import bound_per_s, row
from emulated_bench.machine import Machine, machine_of
from emulated_bench.options import campaign_parser, run_command
from interference_bench.load import add_engine_options
from sglang_coserve.metrics import SloTargets, attainment
from sglang_coserve.srt.emulation.model_directory import set_environment_defaults

Row = dict[str, Any]
_SHARED: Final = ("prefixes", "host_factor")
"""Options that all files of a folder share, in addition to ``Campaign``'s."""


def main() -> int:
    """Do what the command line says, and return the exit status."""
    options = parse_options()
    set_environment_defaults()  # SGLang reads it when it is imported.
    if options.effects:
        measure_effects(options)
        return 0
    return run_command(options, measure)


def measure(options: argparse.Namespace) -> int:
    """Make the runs that are missing."""
    campaign = Campaign.of(options, kind="emulated", shared=_SHARED)
    runs = campaign.missing()
    with machine_of(options, campaign.emulation) as machine:
        failed = run_missing(campaign, runs, partial(emulated_row, machine))
    return campaign.end(failed)


def emulated_row(machine: Machine, run: Run, of_alone: SloTargets) -> Row:
    """Return the figures of a run; ``of_alone`` are the targets of ``OF_ALONE``."""
    case, contender = run.case, run.contender
    load = case.load(run.repeat)
    outcome = machine.run(contender.engine(of_alone), load)
    found = row(outcome, {})
    if contender.name == PLAIN:
        of_alone = targets_of_alone(found)
        requests = case.requests(run.repeat)
        found["bound_tokens_per_s"] = bound_per_s(machine.emulation, requests, load, of_alone)
    attained = {name: attainment(outcome.online, kept) for name, kept in pairs(of_alone).items()}
    return {**found, "attained": attained}


def measure_effects(options: argparse.Namespace) -> None:
    """Run what is missing of effects of the papers, and print the table of all."""
    for name in options.effects:
        effect, path = EFFECTS[name], options.out / f"{name}.json"
        emulation = effect.emulation()
        loads: dict[str, list[Row]] = json.loads(path.read_text())["loads"] if path.exists() else {}
        with machine_of(options, emulation) as machine:
            for label, load in effect.loads.items():
                rows = loads.setdefault(label, [])
                for system in list(effect.systems)[len(rows) :]:
                    targets = effect.targets_of(rows)
                    judged = {
                        "ttft": SloTargets(ttft_s=targets.ttft_s),
                        "tpot": SloTargets(tpot_s=targets.tpot_s),
                    }
                    engine = effect.system(system, targets)
                    found = row(machine.run(engine, load), judged)
                    kept = {f"in_{key}": share for key, share in found.pop("attained").items()}
                    rows.append({"system": system, **found, **kept})
                    print(f"{name}, {label}: {line_of(rows[-1])}", file=sys.stderr)
                    write_results(path, options, emulated=emulation.name, loads=loads)
    paths = {name: options.out / f"{name}.json" for name in EFFECTS}
    stored = {name: json.loads(p.read_text())["loads"] for name, p in paths.items() if p.exists()}
    print(effects.table(stored))


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = campaign_parser(__doc__)
    add_engine_options(parser)
    parser.set_defaults(host_factor=0.0)
    of_papers = "run these of the papers, and no traffic"
    parser.add_argument("--effects", nargs="+", choices=[*EFFECTS], help=of_papers)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
