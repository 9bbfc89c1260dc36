"""Offline requests that share prefixes: how much of their prompts the radix cache saves.

    python benchmark/bench_prefix_order.py --repeats 3 --out prefix_order.json

Groups of requests share a long prefix; their lines come shuffled, and the KV
pool holds a few groups at a time. So what an engine finds in its cache depends
on the order in which it takes them (HyGen §4.3). Compared, interleaved, on the
same model with the same flags:

- stock SGLang, first come, first served (its default) and longest prefix match;
- ours with ``--offline-policy fifo`` and with ``coserve``, whose offline queue
  orders by prefix with freshness.

All lines are sent at the start and wait in the server. Prints and writes the hit
rate (cached prompt tokens over prompt tokens) and the time until the last
answer, medians with ranges, and ratios to stock's default within each repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from coserve_bench.model import ServedModel, prepare_model
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.local_server import LocalServer
from sglang_coserve.srt import cpu

BASELINE = "stock fcfs"
SYSTEMS: dict[str, tuple[str, ...]] = {
    BASELINE: ("--schedule-policy", "fcfs"),
    "stock lpm": ("--schedule-policy", "lpm"),
    "ours fifo": ("--offline-policy", "fifo"),
    "ours coserve": ("--offline-policy", "coserve"),
}
RUN_TIMEOUT_S = 300.0
FIRST_TOKEN_ID = 16


@dataclass(frozen=True, slots=True)
class Run:
    """What one system made of the file."""

    repeat: int
    system: str
    hit_rate: float
    seconds: float


def prompts(options: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """Return the prompts of all groups, shuffled."""
    rng = random.Random(options.seed)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(FIRST_TOKEN_ID, vocab_size), k=count)

    heads = [tokens(options.prefix_tokens) for _ in range(options.groups)]
    lines = [head + tokens(options.suffix_tokens) for head in heads for _ in range(options.members)]
    rng.shuffle(lines)
    return lines


async def serve(
    base_url: str, lines: Sequence[list[int]], output_tokens: int
) -> tuple[float, float]:
    """Send all lines at once; return the hit rate and the seconds until the last answer."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=base_url, timeout=RUN_TIMEOUT_S, limits=limits, trust_env=False
    ) as client:

        async def ask(tokens: list[int]) -> dict[str, Any]:
            body = {"model": "default", "prompt": tokens, "max_tokens": output_tokens}
            body |= {"temperature": 0, "ignore_eos": True, "service_tier": "flex"}
            answer = await client.post("/v1/completions", json=body)
            return dict(answer.raise_for_status().json()["usage"])

        await ask([FIRST_TOKEN_ID])
        (await client.post("/flush_cache", params={"timeout": 30})).raise_for_status()
        start_s = time.perf_counter()
        async with asyncio.timeout(RUN_TIMEOUT_S):
            usages = await asyncio.gather(*map(ask, lines))
        seconds = time.perf_counter() - start_s
    cached = sum((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) for usage in usages)
    return cached / sum(usage["prompt_tokens"] for usage in usages), seconds


def measure(
    system: str, model: ServedModel, work: Path, options: argparse.Namespace
) -> tuple[float, float]:
    """Start a system's server, let it serve the file, stop it."""
    on_cpu = not cpu.has_cuda()
    is_ours = system.startswith("ours")
    flags = ["--model-path", model.path, "--log-level", "warning", "--enable-cache-report"]
    flags += ["--max-total-tokens", str(options.kv_tokens), *SYSTEMS[system]]
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    module = "sglang_coserve.launch_server"
    if not is_ours:
        module = "stock_on_cpu" if on_cpu else "sglang.launch_server"
    if on_cpu:
        cpu.set_environment_defaults(env)
        # Ours has these by default; where one is named above, the later one counts.
        flags = flags if is_ours else [*cpu.default_flags(), *flags]
    lines = prompts(options, vocab_size=model.vocab_size)
    log = work / f"{system.replace(' ', '_')}.log"
    with (
        cpu.divided_cores(1) if on_cpu else nullcontext(),
        LocalServer(flags, module=module, log_path=log, extra_env=env) as server,
    ):
        return asyncio.run(serve(server.base_url, lines, options.output_tokens))


def table_of(runs: Iterable[Run]) -> Table:
    """Medians with ranges, and the ratio of the times to the baseline's of the same repeat."""
    table = Table("system", "hit rate", "seconds", f"speed ÷ {BASELINE}")
    runs = list(runs)
    base = {run.repeat: run.seconds for run in runs if run.system == BASELINE}
    for system in SYSTEMS:
        own = [run for run in runs if run.system == system]
        table.add_row(
            system,
            _spread([100 * run.hit_rate for run in own], "{:.1f}%"),
            _spread([run.seconds for run in own], "{:.1f}"),
            _spread([base[run.repeat] / run.seconds for run in own], "{:.2f}"),
        )
    return table


def _spread(values: Sequence[float], form: str) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{form.format(middle)} ({form.format(low)}–{form.format(high)})"


def main() -> None:
    """Parse the flags, run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--groups", type=int, default=60)
    parser.add_argument("--members", type=int, default=16, help="requests of a group")
    parser.add_argument("--prefix-tokens", type=int, default=384)
    parser.add_argument("--suffix-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--kv-tokens", type=int, default=8192, help="size of the KV pool")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the runs as JSON")
    options = parser.parse_args()
    console = Console()
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder, terminate_as_interrupt():
        work = Path(folder)
        model = prepare_model(None, work)
        order = [(n, system) for n in range(1, options.repeats + 1) for system in SYSTEMS]
        try:
            for repeat, system in track(order, "runs", console=console):
                runs.append(Run(repeat, system, *measure(system, model, work, options)))
        except KeyboardInterrupt:
            runs = [run for run in runs if run.repeat <= len(runs) // len(SYSTEMS)]
            console.print("stopped: whole repeats only")
    if not runs:
        return
    console.print(table_of(runs))
    if options.out is not None:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        record = {"settings": settings, "runs": [asdict(run) for run in runs]}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
