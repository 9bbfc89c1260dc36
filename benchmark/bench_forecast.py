r"""How good the Batch API's forecasts are, and how batches end, in simulation.

    python benchmark/bench_forecast.py --trace azure.csv:1:15:3500 \
        --trace mooncake.jsonl:0.3:25:6000

Of each trace PATH:RATE:GAP:SECONDS: online requests at RATE times the trace's rate for
SECONDS, and batches of 50 to 1,000 lines of three owners, a new one every GAP seconds on the
average, beside them on a modelled H100 with Llama 3.1 8B. What is said of a batch when it is
admitted (``batch.job_forecast``, with what the batches before it have taught) is compared with what
came of it. The same from the rate of the last minute alone stands beside it. Then single
batches without online requests: how long their last lines run on, with the longest first and
without. No wall-clock time is in these figures.

    python benchmark/bench_forecast.py --live --out live.json

does the same with a real server on this machine: batches of 40 to 249 lines, two at a time,
beside online requests. The first ones are learned from, the others judged.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from common.results import write_json
from forecast_bench.calibration import calibrate, summary
from forecast_bench.last_lines import KINDS, serve


def main() -> None:
    """Print both tables; write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", action="append", default=[], metavar="PATH:RATE:GAP:SECONDS")
    parser.add_argument("--slo-ttft-ms", type=float, default=1000.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lines", type=int, default=1500, help="of a single batch")
    parser.add_argument("--rows", type=int, default=128, help="that run at once there")
    parser.add_argument("--seeds", type=int, default=5, help="single batches of each kind")
    parser.add_argument("--out", type=Path, metavar="FORECAST.json")
    parser.add_argument("--live", action="store_true", help="a real server, nothing simulated")
    parser.add_argument("--model-path", help="of the server; by default a small model is made")
    parser.add_argument("--learned", type=int, default=20, help="batches not judged")
    parser.add_argument("--judged", type=int, default=20, help="batches after them")
    parser.add_argument("--online-rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--server-flags", default="", help="more flags of the server")
    given = parser.parse_args()
    if given.live:
        _live(given)
        return
    figures: dict[str, Any] = {"label": "simulated", "settings": _settings(given)}
    figures["calibration"] = [_calibrated(trace, given) for trace in given.trace]
    figures["last_lines"] = [_last_lines(kind, given) for kind in KINDS]
    print(_table(figures))
    if given.out is not None:
        write_json(given.out, figures)


def _live(given: argparse.Namespace) -> None:
    from forecast_bench.live import live

    with TemporaryDirectory() as work:
        found = live(
            Path(work),
            model_path=given.model_path,
            server_flags=tuple(shlex.split(given.server_flags)),
            learned=given.learned,
            judged=given.judged,
            online_rate_per_s=given.online_rate,
            seed=given.seed,
        )
    print({name: value for name, value in found.items() if name != "each"})
    if given.out is not None:
        write_json(given.out, found)


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    names = ("slo_ttft_ms", "slo_tpot_ms", "seed", "lines", "rows", "seeds")
    settings = {name: getattr(given, name) for name in names}
    return {"trace": [Path(trace).name for trace in given.trace], **settings}


def _calibrated(trace: str, given: argparse.Namespace) -> dict[str, Any]:
    path, rate, gap_s, until_s = trace.rsplit(":", 3)
    judged = calibrate(
        Path(path),
        online_rate=float(rate),
        mean_gap_s=float(gap_s),
        until_s=float(until_s),
        seed=given.seed,
        ttft_ms=given.slo_ttft_ms,
        tpot_ms=given.slo_tpot_ms,
    )
    return {"trace": Path(path).name, **summary(judged)}


def _last_lines(kind: str, given: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": kind}
    for name, longest_first in (("before", False), ("after", True)):
        tails = [
            serve(kind, seed, given.lines, given.rows, longest_first=longest_first)
            for seed in range(given.seeds)
        ]
        found[name] = {
            "makespan_s": round(mean(tail.makespan_s for tail in tails), 2),
            "tail_s": round(mean(tail.tail_s for tail in tails), 2),
        }
    return found


def _table(figures: dict[str, Any]) -> str:
    rows = ["(simulated) trace | batches | before P95 | median |error| of P50 | P95/P50"]
    for each in figures["calibration"]:
        for name in ("by_hour", "by_last_minute"):
            of = each[name]
            rows.append(
                f"{each['trace']}, {name} | {each['batches']} | {of['before_p95']:.1%} | "
                f"{of['median_abs_error_p50']:.1%} | {of['median_p95_over_p50']:.2f}"
            )
    rows += ["", "(simulated) batch | makespan s, before -> after | tail s, before -> after"]
    for each in figures["last_lines"]:
        before, after = each["before"], each["after"]
        rows.append(
            f"{each['kind']} | {before['makespan_s']} -> {after['makespan_s']} | "
            f"{before['tail_s']} -> {after['tail_s']}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
