"""Does the bill agree with a replay? What online requests are billed, and what they really lost.

    python benchmark/bench_bill.py --repeats 3 --out benchmark/results/bill_cpu.json

The same online requests twice on a real engine, on a clock of CPU time
(``bench_interference``): with offline requests, and without. How much later their tokens came
is measured; beside it stands what the server billed in the run with offline requests, which
knows nothing of the other one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from common.results import write_results
from interference_bench.engine import RunOutcome
from interference_bench.session import RATES, add_load_flags, engine_flags, measured
from interference_bench.systems import ALONE, SYSTEMS

_AGREES: Final = 0.15


def main() -> None:
    """Run the benchmark; print a table, write the figures."""
    options = parse_options()
    systems = {name: SYSTEMS[name] for name in (ALONE, *options.systems)}
    rows: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True)) as progress:
        for rates, runs in measured(systems, options, sums, progress):
            rows = compared(runs)
            write_results(options.out, options, **{RATES: rates}, rows=rows)
    print_table(rows)


def sums(outcome: RunOutcome) -> dict[str, Any]:
    """Return what was measured and what was billed, in seconds over all requests of a run."""
    assert not outcome.num_unfinished, "all online requests end"
    return {
        "online": len(outcome.ttft_s),
        "ttft_s": sum(outcome.ttft_s),
        "gaps_s": sum(outcome.gaps_s),
        "bill": outcome.bill,
        "offline_tokens_per_s": outcome.offline_tokens / outcome.seconds,
    }


def compared(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs with offline requests, each beside that of the same requests without."""
    of_load = ("repeat", "traffic", "load")
    alone_at = {tuple(run[name] for name in of_load): run for run in runs if run["system"] == ALONE}
    rows = []
    for run in runs:
        if run["system"] == ALONE:
            continue
        alone, bill = alone_at[tuple(run[name] for name in of_load)], run["bill"]
        ttft_s, gaps_s = run["ttft_s"] - alone["ttft_s"], run["gaps_s"] - alone["gaps_s"]
        billed_s = bill["ttft_s"] + bill["gaps_s"]
        rows.append(
            {
                **{name: run[name] for name in (*of_load, "system", "online")},
                "alone_s": alone["ttft_s"] + alone["gaps_s"],
                "measured_s": ttft_s + gaps_s,
                "measured_ttft_s": ttft_s,
                "measured_gaps_s": gaps_s,
                "billed_s": billed_s,
                "billed_ttft_s": bill["ttft_s"],
                "billed_gaps_s": bill["gaps_s"],
                "billed_late_only_s": bill["late_only_s"],
                "billed_requests": bill["requests"],
                "ratio": billed_s / (ttft_s + gaps_s),
                "offline_tokens_per_s": run["offline_tokens_per_s"],
            }
        )
    return rows


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print sums over the repeats, and the ratios of single repeats."""
    table = Table(title="Seconds that offline work added to all online requests of a load")
    for heading in ("traffic", "load", "system"):
        table.add_column(heading)
    for heading in ("requests", "measured", "billed", "÷", "single repeats", "TTFT ÷", "gaps ÷"):
        table.add_column(heading, justify="right")
    table.add_column("late ones only ÷", justify="right")
    for key in dict.fromkeys((one["traffic"], one["load"], one["system"]) for one in rows):
        runs = [one for one in rows if (one["traffic"], one["load"], one["system"]) == key]

        def total(name: str, runs: Sequence[Mapping[str, Any]] = runs) -> float:
            return float(sum(one[name] for one in runs))

        ratio = total("billed_s") / total("measured_s")
        table.add_row(
            key[0],
            f"{key[1]:.0%}",
            key[2],
            f"{statistics.mean(one['online'] for one in runs):.0f}",
            f"{total('measured_s'):.2f}",
            f"{total('billed_s'):.2f}",
            f"{ratio:.2f}" + ("" if abs(ratio - 1) <= _AGREES else " !"),
            " ".join(f"{one['ratio']:.2f}" for one in runs),
            f"{total('billed_ttft_s') / total('measured_ttft_s'):.2f}",
            f"{total('billed_gaps_s') / total('measured_gaps_s'):.2f}",
            f"{total('billed_late_only_s') / total('measured_s'):.2f}",
        )
    console = Console(width=130)
    console.print(table)
    console.print(f"! differs by more than {_AGREES:.0%}", highlight=False)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = engine_flags(__doc__, seconds=60.0)
    systems = [
        name
        for name, system in SYSTEMS.items()
        if name.startswith("coserve") and system.stock_share is None
    ]
    usual = ["coserve", "coserve, slowdown 10%"]
    parser.add_argument("--systems", nargs="+", choices=systems, default=usual)
    add_load_flags(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
