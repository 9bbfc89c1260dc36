"""The harmed share that the allowance holds, on a simulated queue.

    python benchmark/bench_allowance.py

One server, Poisson arrivals of online prompts, offline work in every step as long as the
allowance lets it. 18 settings (load, target as a multiple of the P99 TTFT alone, noise of
step times, without and with slow spells of the machine) with ``--seeds`` seeds each. A
request is harmed when it misses the target, and does not in a run without offline work. The
allowance judges by its no-interference baseline, which knows neither noise nor spells.
"""

from __future__ import annotations

import argparse
from itertools import product

from allowance_bench.queue import QueueSetting, run

LEAST, MOST = 0.005, 0.015
"""The harmed share is held when it is within these."""


def main() -> None:
    """Print a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    held = 0
    print(
        "simulated; of each seed: P99 TTFT / alone's, late %, harmed %, offline share of the time"
    )
    for load, scale, (noise, has_spells) in product(
        (0.2, 0.5, 0.8), (1.0, 1.2, 1.5), ((0.05, False), (0.1, True))
    ):
        cells = []
        for seed in seeds:
            setting = QueueSetting(load, scale, noise, has_spells, seed, arguments.requests)
            got = run(setting)
            held += LEAST <= got.harmed <= MOST
            cells.append(
                f"{got.p99_s / got.alone_p99_s:5.2f} {100 * got.late:5.2f} "
                f"{100 * got.harmed:5.2f} {got.offline:5.3f}"
            )
        spells = "slow spells" if has_spells else ""
        print(f"load {load} target x{scale} noise {noise} {spells:11} | {' | '.join(cells)}")
    print(f"harmed share within {LEAST:.1%} and {MOST:.1%}: {held} of {18 * len(seeds)}")


if __name__ == "__main__":
    main()
