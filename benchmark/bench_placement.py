"""What the placement of lines on engines is worth and costs, on modelled engines.

    python benchmark/bench_placement.py --out placement.json

Simulated: an engine is a number of requests and a prefix cache, the decisions are those of
``core/line_placement`` that the gateway makes. Shown are the part of all prompts' blocks that
engines found in their caches, on 1, 2 and 3 engines with homes by prefix and without, then how
evenly many engines are used and how many lines a second one core places.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.results import write_results
from fleet_bench.placement_model import FleetRun, ModelledFleet, grouped_keys
from sglang_coserve.tables import markdown_table

_COLUMNS = ("engines", "homes", "blocks found", "of one engine's", "lines/s", "most ÷ mean")


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    options = parse_options(argv)
    rows, found = [], []
    one: FleetRun | None = None
    for engines in options.engines:
        for by_prefix in (True, False) if engines > 1 else (True,):
            run = measured(options, engines, by_prefix)
            one = one or run
            found.append(_values(engines, by_prefix, run))
            rows.append(
                (
                    str(engines),
                    "by prefix" if by_prefix else "at random",
                    f"{run.hit_rate:.1%}",
                    f"{run.hit_rate / one.hit_rate:.3f}",
                    f"{run.lines_per_s:,.0f}",
                    f"{run.most_by_mean:.2f}",
                )
            )
    many = measured(options, options.many, by_prefix=True)
    found.append(_values(options.many, True, many))
    table = markdown_table(_COLUMNS, rows)
    print(table)
    print(
        f"\n{options.many:,} engines: {many.decisions_per_s:,.0f} lines placed per CPU second,"
        f" most ÷ mean {many.most_by_mean:.2f}, blocks found {many.hit_rate:.1%}"
    )
    if options.out is not None:
        write_results(options.out, options, runs=found)
    return 0


def measured(options: argparse.Namespace, engines: int, by_prefix: bool) -> FleetRun:
    """Serve the same lines on ``engines`` engines; more on many, so that all have some."""
    keys = grouped_keys(
        max(options.groups, engines * options.lines_each // options.members),
        options.members,
        options.shared_blocks,
        options.own_blocks,
        options.seed,
    )
    fleet = ModelledFleet(
        engines, options.rows, options.cache_blocks, by_prefix=by_prefix, seed=options.seed
    )
    return fleet.run(keys)


def _values(engines: int, by_prefix: bool, run: FleetRun) -> dict[str, Any]:
    return {"engines": engines, "by_prefix": by_prefix, **asdict(run)}


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        SystemExit: argparse refused it, or printed its help.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--engines", type=int, nargs="+", default=[1, 2, 3, 8])
    add("--many", type=int, default=1000)
    add("--groups", type=int, default=1500, help="of lines that share a prefix")
    add("--members", type=int, default=12, help="lines of a group")
    add("--lines-each", type=int, default=400, help="at least, for each engine")
    add("--shared-blocks", type=int, default=16, help="of 128 bytes, about 32 tokens")
    add("--own-blocks", type=int, default=2)
    add("--rows", type=int, default=48, help="lines that an engine runs at a time")
    add("--cache-blocks", type=int, default=2000, help="KV of an engine: about 64,000 tokens")
    add("--seed", type=int, default=1)
    add("--out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
