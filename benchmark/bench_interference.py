"""What offline work costs online requests, and what it gets: engines on a clock of CPU time.

    python benchmark/bench_interference.py --repeats 3 --out benchmark/results/interference_cpu.json

Every system is a real scheduler, model and event loop in one thread of a process of its own.
Its clock is the CPU time of that thread, so that other work on the machine counts only by
what it does to caches. Online requests arrive as a Poisson process, also in the middle of a
step; offline requests wait at any time. HTTP, tokenizing and the threads of a server are not
in it: ``bench_coserve`` has those.

The rate of online requests is chosen so that online requests alone keep the engine busy for
the given share of the time. All systems of a repeat get the same requests, one after the
other in a random order; ratios are taken within a repeat. ``--aa`` runs the first system
twice, which shows the noise.
"""

from __future__ import annotations

import argparse
from typing import Any

from common import stock
from common.results import write_results
from interference_bench.report import print_table, row
from interference_bench.sweep import sweep, sweep_flags
from interference_bench.systems import ALONE, SYSTEMS
from sglang_coserve.errors import ConfigError


def main() -> None:
    """Run the benchmark; print a table, write the figures."""
    options = parse_options()
    rows: list[dict[str, Any]] = []
    names = [ALONE, *options.systems, *([f"{options.systems[0]}, again"] if options.aa else [])]
    systems = {name: SYSTEMS[name.removesuffix(", again")] for name in names}
    for swept in sweep(systems, options):
        rows += [{**swept.place, "system": name, **row(o)} for name, o in swept.outcomes.items()]
        rates = swept.rates_per_s
        write_results(options.out, options, requests_per_s_at_full_load=rates, rows=rows)
    print_table(rows, names)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = sweep_flags(__doc__)
    known = [name for name in SYSTEMS if name != ALONE]
    interleaved = {name for name in known if "prefill_decode_interval" in SYSTEMS[name].flags}
    usual = [
        name
        for name in known
        if not name.startswith("coserve, ")
        and (name not in interleaved or stock.has_decode_interval())
    ]
    parser.add_argument("--systems", nargs="+", choices=known, default=usual)
    parser.add_argument("--aa", action="store_true", help="run the first system twice")
    options = parser.parse_args()
    for name in interleaved.intersection(options.systems):
        try:
            stock.require_decode_interval(name)
        except ConfigError as error:
            parser.error(str(error))
    return options


if __name__ == "__main__":
    main()
