"""What KV checkpointing costs, and what it saves.

    python benchmark/bench_kv_checkpoint.py parts
    python benchmark/bench_kv_checkpoint.py trace --repeats 3 --out kv_checkpoint.json

``parts`` times the cache alone, without a model: reclaiming saved KV, releasing a
row, and the work that each iteration does for the rows that decode (what the
scheduler's thread spends; the copies run in another).

``trace`` runs our server on a small model in turn with ``--kv-checkpoint off`` and
on, under the same load: offline requests that never run out and bursts of large
online prompts that take the KV memory back each time. Printed: offline tokens/s,
online P99 TTFT and the recompute tax, medians with their range, and the ratio of
each pair of runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kv_bench.bare_cache import BareEngine, BareRow
from kv_bench.trace import compare
from sglang_coserve.core.kv_checkpoint import CheckpointMode, CheckpointPolicy

EAGER = CheckpointPolicy(CheckpointMode.EAGER)


def milliseconds(action: Callable[..., object], *arguments: object) -> float:
    """Return how long a call takes."""
    begin_s = time.perf_counter()
    action(*arguments)
    return (time.perf_counter() - begin_s) * 1e3


def decoding_rows(
    page_tokens: int, rows: int, prompt_tokens: int, generated: int, *, to_come: int = 0
) -> BareEngine:
    """Return an engine with so many offline rows that have decoded, all of it saved, and with
    memory for ``to_come`` more tokens of each."""
    tokens = rows * (prompt_tokens + generated + to_come + page_tokens)
    tokens = -(-tokens // page_tokens) * page_tokens
    engine = BareEngine(EAGER, slots=tokens, host_slots=2 * tokens, page_tokens=page_tokens)
    for number in range(rows):
        prompt = [number % 50, *((number * 7 + place) % 50 for place in range(prompt_tokens - 1))]
        assert engine.admit(BareRow(f"r{number}", prompt, offline=True))
        engine.checkpoint()
    for _ in range(generated):
        for row in engine.running:
            assert engine.decode(row)
        engine.checkpoint()
        engine.settle()
    return engine


def print_iteration_cost(page_tokens: int, rows: int, steps: int) -> None:
    """Time ``checkpoint_step`` with ``check_hicache_events``, per decode iteration."""
    engine = decoding_rows(page_tokens, rows, prompt_tokens=32, generated=4, to_come=steps)
    times_ms = []
    for _ in range(steps):
        for row in engine.running:
            assert engine.decode(row)
        times_ms.append(
            milliseconds(engine.cache.check_hicache_events) + milliseconds(engine.checkpoint)
        )
        engine.cache.cache_controller.write_stream.synchronize()
    report(f"iteration, {rows} offline rows", page_tokens, times_ms)


def print_reclaim_cost(page_tokens: int, tokens: int, repeats: int) -> None:
    """Time the release of 16 rows, and the reclaim of their slots."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    release_ms, reclaim_ms = [], []
    for _ in range(repeats):
        rows = 16
        engine = decoding_rows(page_tokens, rows, tokens // rows - 16, generated=32)
        release_ms += [milliseconds(engine.release, row) for row in list(engine.running)]
        reclaim_ms.append(milliseconds(engine.cache.evict, EvictParams(num_tokens=tokens)))
        assert engine.cache.counts["demoted_tokens"] >= tokens
    report("release of a row", page_tokens, release_ms)
    report(f"reclaim of {tokens} saved tokens", page_tokens, reclaim_ms)


def report(name: str, page_tokens: int, times_ms: list[float]) -> None:
    """Print one line."""
    print(
        f"{name:34} page {page_tokens:3}: median {statistics.median(times_ms):7.3f} ms, "
        f"most {max(times_ms):7.3f} ms",
        flush=True,
    )


def main() -> None:
    """Run one of the two benchmarks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    parts = commands.add_parser("parts", help="the cache alone")
    parts.add_argument("--pages", type=int, nargs="+", default=[1, 16])
    parts.add_argument("--rows", type=int, default=64)
    parts.add_argument("--steps", type=int, default=200)
    parts.add_argument("--tokens", type=int, default=4096)
    parts.add_argument("--repeats", type=int, default=5)
    trace = commands.add_parser("trace", help="two servers under a bursty load")
    trace.add_argument("--mode", choices=["eager", "lazy", "pressure"], default="eager")
    trace.add_argument("--repeats", type=int, default=3)
    trace.add_argument("--seconds", type=float, default=60.0)
    trace.add_argument("--out", type=Path, metavar="FIGURES.json")
    options = parser.parse_args()
    if options.command == "trace":
        compare(options.mode, options.repeats, options.seconds, options.out)
        return
    torch.set_num_threads(1)  # As a scheduler that shares its cores.
    for page_tokens in options.pages:
        print_iteration_cost(page_tokens, options.rows, options.steps)
        print_reclaim_cost(page_tokens, options.tokens, options.repeats)


if __name__ == "__main__":
    main()
