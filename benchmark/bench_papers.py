"""The papers' experiments, simulated: ours beside what each paper's text states.

    python benchmark/bench_papers.py
    python benchmark/bench_papers.py hygen_fig6 --trace AzureLLMInferenceTrace_conv.csv

The scheduler is the production code, the machine a roofline of the paper's hardware: see
docs/simulator.md. Writes ``NAME.md`` of each experiment to ``--out``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markdown import Markdown

from common.machine import commit
from paper import bros, conserve, hygen, ooco
from paper.experiment import Conditions, Experiment, to_markdown

EXPERIMENTS: Final = {
    "conserve_fig6": Experiment("ConServe Fig. 6: online load and SLO scale", conserve.fig6, 240.0),
    "hygen_fig6": Experiment("HyGen Fig. 6: prefix sharing maximization", hygen.fig6),
    "bros_fig9_10": Experiment("BROS Fig. 9 and 10: hybrid workloads", bros.fig9_10),
    "ooco_fig6": Experiment("OOCO Fig. 6: two instances within 3% online violations", ooco.fig6),
}


def main() -> None:
    """Run what was named, one experiment after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument(
        "--seconds", type=float, help="simulated time of a run (default: 120 or 240)"
    )
    parser.add_argument(
        "--trace", type=Path, help="Azure's conversation trace; else the bundled sample"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-papers"), metavar="FOLDER")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - EXPERIMENTS.keys()):
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(EXPERIMENTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or EXPERIMENTS:
        run(name, options)


def run(name: str, options: argparse.Namespace) -> None:
    """Run one experiment, print its tables and write them."""
    experiment = EXPERIMENTS[name]
    conditions = Conditions(options.seconds or experiment.seconds, options.trace)
    print(f"{name}: simulated, not measured", file=sys.stderr, flush=True)
    findings = list(experiment.measure(conditions))
    command = f"python benchmark/bench_papers.py {name}"
    command += f" --seconds {options.seconds:g}" if options.seconds else ""
    command += f" --trace {options.trace.name}" if options.trace else ""
    origin = f"`{command}`, commit {commit()}, {conditions.seconds:g} simulated seconds a run."
    table = to_markdown(experiment.title, origin, findings)
    (options.out / f"{name}.md").write_text(table)
    Console(width=150).print(Markdown(table))


if __name__ == "__main__":
    main()
