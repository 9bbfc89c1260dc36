"""The papers' experiments, simulated: ours beside what each paper's text states.

    python benchmark/bench_papers.py
    python benchmark/bench_papers.py hygen_fig6

The scheduler is the production code, the machine a roofline of the paper's hardware: see
docs/simulator.md. Writes ``NAME.md`` of each experiment to ``--out``, with a hash of what it
depends on: a test says which tables in benchmark/results are no longer what the code gives.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from common.machine import commit
from paper import (
    bros,
    conserve,
    conserve_load,
    hygen,
    hygen_budgets,
    hygen_control,
    hygen_settings,
    one_engine,
    ooco,
    questions,
)
from paper.experiment import Experiment, to_markdown

EXPERIMENTS: Final = {
    "conserve_fig6": Experiment("ConServe Fig. 6: online load and SLO scale", conserve.fig6, 240.0),
    "conserve_fig8": Experiment("ConServe Fig. 8: burstiness and lengths", conserve.fig8),
    "conserve_table2": Experiment("ConServe Table 2: 70B on four H100", conserve.table2),
    "conserve_ablation": Experiment("ConServe §6.5: two mechanisms", conserve.ablation, 600.0),
    "conserve_fig1_3": Experiment(
        "ConServe Fig. 1, 2 and 3: load, idle GPUs, two priorities", conserve_load.motivation, 240.0
    ),
    "conserve_fig7_9": Experiment(
        "ConServe Fig. 7 and 9: a trace over time", conserve_load.over_time, 600.0
    ),
    "hygen_fig6": Experiment("HyGen Fig. 6: prefix sharing maximization", hygen.fig6),
    "hygen_fig15": Experiment("HyGen Fig. 15: offline throughput over online load", hygen.fig15),
    "hygen_budgets": Experiment("HyGen Fig. 3, 4, 7, 10: budgets", hygen_budgets.budgets, 110.0),
    "hygen_settings": Experiment(
        "HyGen Fig. 4, 9, 12, 13: models, machines, traces", hygen_settings.settings, 100.0
    ),
    "hygen_control": Experiment(
        "HyGen Fig. 5, 8, 11, 14: time, targets, predictors", hygen_control.control, 80.0
    ),
    "bros_fig9_10": Experiment("BROS Fig. 9, 10 and 12: hybrid workloads", bros.fig9_10),
    "bros_fig11": Experiment("BROS Fig. 11: RT requests alone", one_engine.bros_fig11, 60.0),
    "ooco_fig6": Experiment("OOCO Fig. 6: two instances", ooco.fig6, 60.0),
    "ooco_fig3": Experiment(
        "OOCO Fig. 3 and Table 6: roofline and throughput", one_engine.ooco_points, 60.0
    ),
    "questions": Experiment("Questions of HyGen's reviewers", questions.questions, 60.0),
}


def main() -> None:
    """Run what was named, one experiment after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--out", type=Path, default=Path("bench-papers"), metavar="FOLDER")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - EXPERIMENTS.keys()):
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(EXPERIMENTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    made_at = commit()  # Before the first table makes it dirty.
    for name in options.names or EXPERIMENTS:
        print(f"{name}: simulated, not measured", file=sys.stderr, flush=True)
        table = run(name, EXPERIMENTS[name], made_at)
        (options.out / f"{name}.md").write_text(table)
        print(table)


def run(name: str, experiment: Experiment, made_at: str | None) -> str:
    """Run one experiment; return its tables, and what they were made from."""
    findings = list(experiment.measure(experiment.seconds))
    origin = (
        f"`python benchmark/bench_papers.py {name}`, commit {made_at}, inputs "
        f"{experiment.inputs_hash()}, {experiment.seconds:g} simulated seconds a run."
    )
    return to_markdown(experiment.title, origin, findings)


if __name__ == "__main__":
    main()
