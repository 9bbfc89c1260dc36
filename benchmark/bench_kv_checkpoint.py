"""What KV checkpoints cost, and what they save.

    python benchmark/bench_kv_checkpoint.py --out kv_checkpoint.json

Repeats three things in turn and prints one table of medians with their range:

- the cache alone, without a model (``kv_bench.parts``): the time to reclaim saved KV, and
  what each step spends on checkpoints;
- our server with ``--kv-checkpoint off`` under offline requests that never run out and bursts of
  online prompts, which take the KV memory back each time (``kv_bench.trace``): once with long
  offline outputs, once with long offline prompts;
- the same with checkpoints, on the same prompts.

Copies are as fast as the machine makes them; no bandwidth is emulated.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

from common.results import write_results
from kv_bench.device_cache import KvEngine
from kv_bench.parts import GENERATED_TOKENS, reclaim, step
from kv_bench.pools import KvShape
from kv_bench.trace import LOADS, BurstRun, run
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.tables import median_and_range

OFF = "off"
STEPS = 200
RECLAIMED_REQUESTS = 16


def main() -> None:
    """Measure, print the table, and write all figures down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mode", choices=["eager", "lazy", "pressure"], default="eager")
    parser.add_argument("--page-size", type=int, default=16, help="of the servers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load for each server")
    parser.add_argument("--rows", type=int, default=64, help="decoding, for the cache alone")
    parser.add_argument("--tokens", type=int, default=4096, help="to reclaim")
    names = [load.name for load in LOADS]
    parser.add_argument("--loads", nargs="*", choices=names, default=names, help="none: no servers")
    parser.add_argument("--model-path", type=Path, help="default: a small random model")
    parser.add_argument("--server-flags", default="", metavar="'FLAGS'", help="for every server")
    parser.add_argument("--out", type=Path, metavar="FIGURES.json")
    options = parser.parse_args()
    loads = [load for load in LOADS if load.name in options.loads]
    torch.set_num_threads(1)  # As a scheduler that shares its cores.

    timed: dict[str, list[float]] = {}
    runs: list[BurstRun] = []
    with tempfile.TemporaryDirectory() as directory, terminate_as_interrupt():
        work = Path(directory)
        model = options.model_path or make_small_model(work / "model", SmallModelSpec())
        for repeat in range(options.repeats):
            for page in (1, 16):
                for name, ms in cache_alone_ms(page, options.tokens, options.rows).items():
                    timed.setdefault(f"{name}, page {page}", []).append(ms)
            write_results(options.out, options, parts_ms=timed, runs=list(map(asdict, runs)))
            for load, mode in product(loads, (OFF, options.mode)):
                made = run(
                    load,
                    repeat,
                    mode,
                    page_size=options.page_size,
                    flags=["--model-path", str(model), *shlex.split(options.server_flags)],
                    work=work,
                    seconds=options.seconds,
                )
                runs.append(made)
                print(made.summary(), flush=True)
                write_results(options.out, options, parts_ms=timed, runs=list(map(asdict, runs)))

    print(f"\n{'':44} median (range)")
    for name, times_ms in timed.items():
        print(f"{name:44} {median_and_range(times_ms, '{:.3f}')} ms")
    for load in loads:
        print_runs(load.name, [made for made in runs if made.load == load.name], options.mode)


def cache_alone_ms(page: int, tokens: int, requests: int) -> dict[str, float]:
    """Return the times of the cache alone, on the CPU, by name."""
    used = tokens + RECLAIMED_REQUESTS * (GENERATED_TOKENS + page)
    slots = -(-max(used, requests * (17 * page + STEPS)) // page) * page
    shape = KvShape(2, 1, 1, slots, page, max(requests, RECLAIMED_REQUESTS), 8192, torch.float32)
    engine = KvEngine(shape, device="cpu")
    reclaimed = reclaim(engine, tokens, RECLAIMED_REQUESTS, repeats=1)
    stepped = step(engine, requests, STEPS, new_tokens=1)
    return {
        f"reclaim {tokens} saved tokens": reclaimed["ms"],
        f"checkpoints of {requests} requests, a step": stepped["host_ms"],
    }


FIGURES: Sequence[tuple[str, Callable[[BurstRun], float], str]] = (
    ("tokens recomputed for each eviction", lambda r: r.recomputed_per_eviction, "{:.1f}"),
    ("recompute tax of offline work", lambda r: r.recompute_tax, "{:.2%}"),
    ("offline tokens/s", lambda r: r.offline_tokens_per_s, "{:.1f}"),
    ("online P50 TTFT, ms", lambda r: r.online_p50_ttft_ms, "{:.0f}"),
    ("online P99 TTFT, ms", lambda r: r.online_p99_ttft_ms, "{:.0f}"),
    ("evictions", lambda r: r.evicted, "{:.0f}"),
)


def print_runs(load: str, runs: Sequence[BurstRun], mode: str) -> None:
    """Print each figure without and with checkpoints, and the ratio of each pair of runs."""
    print(f"\n{'long ' + load:36} {OFF:>28} {mode:>28} {'ratio':>24}")
    for name, value, style in FIGURES:
        off, on = ([value(entry) for entry in runs if entry.mode == m] for m in (OFF, mode))
        ratios = [b / a for a, b in zip(off, on, strict=True) if a]
        ratio = median_and_range(ratios, "{:.3f}") if ratios else ""
        cells = [median_and_range(values, style) for values in (off, on)]
        print(f"{name:36} {cells[0]:>28} {cells[1]:>28} {ratio:>24}")


if __name__ == "__main__":
    main()
