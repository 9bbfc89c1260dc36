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
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coserve_bench.machine import describe_machine
from interference_bench.engine import Engine, Outcome
from interference_bench.load import Load, OnlineTraffic
from interference_bench.systems import SYSTEMS
from own_process import OwnProcess
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.progress_bar import progress_bar
from sglang_coserve.small_model import SmallModelSpec, make_small_model

TRAFFIC = OnlineTraffic((32, 256), (4, 24))


def main() -> None:
    """Run the benchmark; print the ratios, write the figures."""
    options = parse_options()
    minutes: list[dict[str, Any]] = []
    targets = {"slo_ttft_ms": options.ttft_ms, "slo_tpot_ms": options.tpot_ms}
    with tempfile.TemporaryDirectory() as directory, terminate_as_interrupt():
        model = make_small_model(Path(directory) / "model", SmallModelSpec(layers=12, hidden=128))
        with progress_bar() as bar:
            steps = bar.add_task("first minutes", total=options.starts * options.minutes)
            for start in range(options.starts):
                system = SYSTEMS["coserve"]
                with OwnProcess(Engine, system, model, options.core, targets) as engine:
                    for minute in range(options.minutes):
                        load = Load(
                            TRAFFIC,
                            options.rate,
                            options.seconds,
                            seed=(start + minute) % options.minutes,
                            offline_prompt_tokens=512,
                            offline_output_tokens=32,
                            offline_in_flight=16,
                        )
                        outcome: Outcome = engine.call("run", load)
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
    if options.out:
        settings = {key: str(value) for key, value in vars(options).items()}
        document = {"machine": describe_machine(), "settings": settings, "minutes": minutes}
        options.out.write_text(json.dumps(document) + "\n")


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--minutes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU time, a minute's")
    parser.add_argument("--rate", type=float, default=4.0, help="online requests a second")
    parser.add_argument("--ttft-ms", type=float, default=100.0)
    parser.add_argument("--tpot-ms", type=float, default=50.0)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
