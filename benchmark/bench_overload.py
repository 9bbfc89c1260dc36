"""Two tenants, one of which floods the engine; and more online requests than can be served.

    python benchmark/bench_overload.py --repeats 3 --out benchmark/results/overload_cpu.json

Real schedulers, models and event loops on a clock of CPU time, as of ``bench_interference``.
Loads are parts of the rate of online requests that keeps an engine busy all the time.

- *Tenants*: one sends a tenth of that rate (``--modest``), another 150%. What the first gets
  is compared with what it gets without the other, in order of arrival and with
  ``--online-order vtc``.
- *Overload*: 150% of that rate, beside offline requests that never end, served as well as
  can be and with ``--overload shed``. Attained is what had its first token and its mean time
  per output token within the targets; of those served, and of all.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common.results import write_results
from interference_bench.engine import OnlineOutcome, RunOutcome
from interference_bench.load import FLOOD, MODEST, Load, OnlineTraffic
from interference_bench.session import OFFLINE, engine_flags, engines, full_rate_per_s
from interference_bench.systems import EngineSystem
from sglang_coserve.tables import median_and_range

TRAFFIC: Final = OnlineTraffic((32, 256), (1, 4))

_POLICY: Final = {"offline_policy": "coserve"}
SYSTEMS: Final[Mapping[str, EngineSystem]] = {
    "arrival": EngineSystem(coserve=_POLICY, takes_slo=True),
    "vtc": EngineSystem(coserve={**_POLICY, "online_order": "vtc"}, takes_slo=True),
    "shed": EngineSystem(coserve={**_POLICY, "overload": "shed"}, takes_slo=True),
}
"""By what they do: the order of arrival with best effort, and one setting that differs."""


def main() -> None:
    """Run the benchmark; print two tables, write the figures."""
    options = parse_options()
    rows: list[dict[str, Any]] = []
    with engines(SYSTEMS, options) as running:
        full_per_s = full_rate_per_s(running["arrival"], TRAFFIC, options.seconds)
        runs = [(repeat, *run) for repeat in range(options.repeats) for run in cases(repeat)]
        for repeat, case, name in track(runs, "runs", console=Console(stderr=True)):
            load = load_of(case, full_per_s, options, repeat)
            outcome: RunOutcome = running[name].call("run", load)
            figures = figures_of(outcome.requests, options.ttft_ms, options.tpot_ms)
            rows.append({"repeat": repeat, "case": case, "system": name, **figures})
            write_results(options.out, options, requests_per_s_at_full_load=full_per_s, rows=rows)
    print_tables(rows)


def cases(repeat: int) -> list[tuple[str, str]]:
    """Return what runs in a repeat, in a random order."""
    runs = [("alone", "arrival"), ("alone", "vtc"), ("flooded", "arrival"), ("flooded", "vtc")]
    runs += [("overload", "arrival"), ("overload", "shed")]
    return random.Random(repeat).sample(runs, len(runs))


def load_of(case: str, full_per_s: float, options: argparse.Namespace, repeat: int) -> Load:
    """Return the requests of one run."""
    load = Load(TRAFFIC, options.modest * full_per_s, options.seconds, seed=repeat)
    if case == "flooded":
        return replace(load, flood_per_s=options.flood * full_per_s)
    if case == "overload":
        return replace(
            load,
            rate_per_s=options.flood * full_per_s,
            **OFFLINE,
        )
    return load


def figures_of(requests: Sequence[OnlineOutcome], ttft_ms: float, tpot_ms: float) -> dict[str, Any]:
    """Return what came of a run, by tenant."""
    figures: dict[str, Any] = {}
    for tenant in (None, MODEST, FLOOD):
        of_tenant = [one for one in requests if one.tenant == tenant]
        if not of_tenant:
            continue
        served = [one for one in of_tenant if one.ttft_s is not None]
        ttfts_ms = [1e3 * one.ttft_s for one in served if one.ttft_s is not None]
        in_time = [(one.ttft_s or 0.0) * 1e3 <= ttft_ms for one in served]
        in_pace = [(one.tpot_s or 0.0) * 1e3 <= tpot_ms for one in served]
        attained = sum(map(all, zip(in_time, in_pace, strict=True)))
        figures[tenant or "all"] = {
            "requests": len(of_tenant),
            "refused": len(of_tenant) - len(served),
            "ttft_p50_ms": float(np.percentile(ttfts_ms, 50)),
            "ttft_p99_ms": float(np.percentile(ttfts_ms, 99)),
            "attained": attained,
            "attained_ttft": sum(in_time),
            "attained_tpot": sum(in_pace),
        }
    return figures


def print_tables(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print medians over the repeats, with the range of what is compared."""

    def of(case: str, system: str, tenant: str, name: str) -> list[float]:
        return [
            float(row[tenant][name])
            for row in sorted(rows, key=lambda row: int(row["repeat"]))
            if (row["case"], row["system"]) == (case, system)
        ]

    table = Table(title="A tenant beside one that floods: TTFT, ms of CPU time")
    for heading in ("order", "P50 alone", "P50", "P99 alone", "P99", "P99 ÷ alone"):
        table.add_column(heading, justify="right")
    for system in ("arrival", "vtc"):
        p50, p99 = (of("flooded", system, MODEST, f"ttft_{name}_ms") for name in ("p50", "p99"))
        alone_p50, alone_p99 = (of("alone", system, "all", f"ttft_{n}_ms") for n in ("p50", "p99"))
        ratios = [one / other for one, other in zip(p99, alone_p99, strict=True)]
        figures = [statistics.median(values) for values in (alone_p50, p50, alone_p99, p99)]
        table.add_row(system, *(f"{value:.1f}" for value in figures), median_and_range(ratios))
    Console(width=120).print(table)

    table = Table(title="Overload")
    for heading in ("overload", "requests", "refused", "P99 TTFT ms", "attained of served", "all"):
        table.add_column(heading, justify="right")
    for system in ("arrival", "shed"):
        names = ("requests", "refused", "attained", "ttft_p99_ms")
        requests, refused, attained, p99 = (of("overload", system, "all", name) for name in names)
        of_served = [a / (n - r) for a, n, r in zip(attained, requests, refused, strict=True)]
        of_all = [a / n for a, n in zip(attained, requests, strict=True)]
        table.add_row(
            "best_effort" if system == "arrival" else system,
            f"{sum(requests):.0f}",
            f"{sum(refused) / sum(requests):.1%}",
            f"{statistics.median(p99):.0f}",
            median_and_range(of_served, "{:.3f}"),
            median_and_range(of_all, "{:.3f}"),
        )
    Console(width=120).print(table)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = engine_flags(__doc__, seconds=30.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modest", type=float, default=0.1, help="load of the one tenant")
    parser.add_argument("--flood", type=float, default=1.5, help="of the other, and overload")
    return parser.parse_args()


if __name__ == "__main__":
    main()
