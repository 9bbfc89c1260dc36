"""What offline work costs online requests, and what it gets: engines on a clock of CPU time.

    python benchmark/bench_interference.py --repeats 3 --out interference.json

Every system is a real scheduler, model and event loop in one thread of a process of its own.
Its clock is the CPU time of that thread, so that other work on the machine counts only by
what it does to caches. Online requests arrive as a Poisson process, also in the middle of a
step; offline requests wait at any time. HTTP, tokenizing and the threads of a server are not
in it: ``sglang_coserve.bench_serving`` has those.

The rate of online requests is chosen so that online requests alone keep the engine busy for
the given share of the time. All systems of a repeat get the same requests, one after the
other in a random order; ratios are taken within a repeat.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.results import write_results
from interference_bench.load import TRAFFIC, load_parser
from interference_bench.report import table
from interference_bench.session import measured
from interference_bench.systems import ALONE, SYSTEMS


def main() -> None:
    """Run the benchmark; print a table, write the figures."""
    options = parse_options()
    systems = {name: SYSTEMS[name] for name in (ALONE, *options.systems)}
    rows: Sequence[Mapping[str, Any]] = ()
    for rates, rows in measured(systems, options):
        write_results(options.out, options, requests_per_s_at_full_load=rates, rows=rows)
    print(table(rows, list(systems)))


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = load_parser(__doc__, TRAFFIC)
    parser.set_defaults(
        traffic=["prompts", "outputs"],
        repeats=3,
        seconds=60.0,
        offline=[512, 32],
        in_flight=16,
        ttft_ms=100.0,
        tpot_ms=50.0,
        host_factor=1.0,
    )
    add = parser.add_argument
    add("--model-path", type=Path, help="instead of 12 layers of width 128")
    add("--out", type=Path, help="write the figures as JSON")
    known = [name for name in SYSTEMS if name != ALONE]
    usual = [name for name in known if not name.startswith("coserve, ")]
    add("--systems", nargs="+", choices=known, default=usual)
    return parser.parse_args()


if __name__ == "__main__":
    main()
