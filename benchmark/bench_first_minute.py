"""Latencies of online requests in the first minute after a start, against those of later minutes.

    python benchmark/bench_first_minute.py --out benchmark/results/first_minute_cpu.json

An engine that has only its quick profile begins beside offline requests, on a clock of CPU time
as in ``bench_interference``. Each start has the same load for some minutes; each minute has its
own requests, the same in all starts but in another order, so that every set of requests is once
in the first minute. Ratios are P99s: of all first minutes over all later ones. ``last ÷ others``
is the same for the last minute, which shows the noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.results import write_results
from interference_bench.engine import RunOutcome
from interference_bench.load import Load, OnlineTraffic
from interference_bench.session import OFFLINE, engine_flags, engines
from interference_bench.systems import SYSTEMS
from sglang_coserve.progress_bar import progress_bar

TRAFFIC = OnlineTraffic((32, 256), (4, 24))


def main() -> None:
    """Run the benchmark; print the ratios, write the figures."""
    options = parse_options()
    minutes: list[dict[str, Any]] = []
    with progress_bar() as bar:
        steps = bar.add_task("first minutes", total=options.starts * options.minutes)
        for start in range(options.starts):
            with engines({"coserve": SYSTEMS["coserve"]}, options) as running:
                for minute in range(options.minutes):
                    seed = (start + minute) % options.minutes
                    load = Load(TRAFFIC, options.rate, options.seconds, seed, **OFFLINE)
                    outcome: RunOutcome = running["coserve"].call("run", load)
                    minutes.append(
                        {
                            "start": start,
                            "minute": minute,
                            "ttft_ms": [round(1e3 * value, 2) for value in outcome.ttft_s],
                            "gaps_ms": [round(1e3 * value, 2) for value in outcome.gaps_s],
                            "offline_tokens_per_s": outcome.offline_tokens / outcome.seconds,
                            "unfinished": outcome.num_unfinished,
                        }
                    )
                    bar.advance(steps)
    for name, wanted in (("first", 0), ("last", options.minutes - 1)):
        print(f"{name} ÷ other minutes: " + ratios(minutes, wanted))
    write_results(options.out, options, minutes=minutes)


def ratios(minutes: Sequence[dict[str, Any]], wanted: int) -> str:
    """Return P50 and P99 of one minute's latencies over those of the others, as text."""
    texts = []
    for key, label in (("ttft_ms", "TTFT"), ("gaps_ms", "ITL")):
        inside = [value for m in minutes if m["minute"] == wanted for value in m[key]]
        outside = [value for m in minutes if m["minute"] != wanted for value in m[key]]
        points = [np.percentile(inside, p) / np.percentile(outside, p) for p in (50, 99)]
        texts.append(f"{label} P50 {points[0]:.2f}, P99 {points[1]:.2f} ({len(inside)} values)")
    rates = [
        np.mean([m["offline_tokens_per_s"] for m in minutes if (m["minute"] == wanted) is inside])
        for inside in (True, False)
    ]
    return "; ".join([*texts, f"offline tokens/s {rates[0] / rates[1]:.2f}"])


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = engine_flags(__doc__, seconds=60.0)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--minutes", type=int, default=4)
    parser.add_argument("--rate", type=float, default=4.0, help="online requests a second")
    return parser.parse_args()


if __name__ == "__main__":
    main()
