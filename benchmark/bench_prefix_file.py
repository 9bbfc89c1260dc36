"""A file of shuffled lines that share prefixes: how much of its prompts the radix cache saves.

    python benchmark/bench_prefix_file.py --out prefix_file.json

Far more lines than an engine has at a time, and far more prefixes than its KV pool holds, so
the order in which lines are given to the engine decides. Compared, on the same model with the
same flags:

- stock SGLang with longest prefix match, which gets the lines in the order of the file, 128 at
  a time: with more that wait it would go back to first come, first served;
- ours through the Batch API;
- ours without it, through ``coserve submit``.

Cached prompt tokens are shown beside those of a perfect order, which computes every prefix
once. Times are CPU seconds of the server's processes, what orders the lines included where it
is one of them, from the first line until the last answer: other work on the machine does not
count. The client's are in the JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench_prefix_order import FIRST_TOKEN_ID, prompts
from coserve_bench.model import ServedModel, prepare_model
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.local_server import LocalServer
from sglang_coserve.srt import cpu

BASELINE = "stock lpm"
LINES_AT_STOCK = 128
RUN_TIMEOUT_S = 7200.0


@dataclass(frozen=True, slots=True)
class Run:
    """What one system made of the file."""

    repeat: int
    system: str
    prompt_tokens: int
    cached_tokens: int
    server_cpu_s: float
    client_cpu_s: float
    wall_s: float


def line_of(number: int, tokens: Sequence[int], output_tokens: int) -> dict[str, Any]:
    """Return one line of the file."""
    body = {"model": "default", "prompt": list(tokens), "max_tokens": output_tokens}
    body |= {"temperature": 0, "ignore_eos": True}
    fields = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
    return fields | {"body": body}


def by_stock(server: LocalServer, source: Path, work: Path) -> list[dict[str, Any]]:
    """Send the lines in the order of the file; return what each used."""
    del work
    used: list[dict[str, Any]] = []

    async def run() -> None:
        limits = httpx.Limits(max_connections=LINES_AT_STOCK)
        lines = iter(source.read_bytes().splitlines())
        async with (
            httpx.AsyncClient(
                base_url=server.base_url, timeout=RUN_TIMEOUT_S, limits=limits, trust_env=False
            ) as client,
            asyncio.TaskGroup() as workers,
        ):

            async def work_on() -> None:
                for line in lines:
                    answer = await client.post("/v1/completions", json=json.loads(line)["body"])
                    used.append(answer.raise_for_status().json()["usage"])

            for _ in range(LINES_AT_STOCK):
                workers.create_task(work_on())

    asyncio.run(run())
    return used


def by_submit(*flags: str) -> Callable[[LocalServer, Path, Path], list[dict[str, Any]]]:
    """Return how ``coserve submit`` with these flags takes the file to its records."""

    def run(server: LocalServer, source: Path, work: Path) -> list[dict[str, Any]]:
        output = work / f"out-{time.time_ns()}.jsonl"
        command = [sys.executable, "-m", "sglang_coserve", "submit", str(source), "-o", str(output)]
        command += ["--base-url", server.base_url, *flags]
        subprocess.run(command, check=True, timeout=RUN_TIMEOUT_S, stdout=subprocess.DEVNULL)
        with output.open("rb") as records:
            return [json.loads(record)["response"]["body"]["usage"] for record in records]

    return run


SYSTEMS = {
    BASELINE: by_stock,
    "ours, Batch API": by_submit("--window", "24h"),
    "ours, coserve submit": by_submit("--no-batch"),
}


def cpu_s(pid: int) -> float:
    """Return what a process, its children and those of them that have ended have taken."""
    leader = psutil.Process(pid)
    total = 0.0
    for process in [leader, *leader.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def own_cpu_s() -> float:
    """Return what this process and its ended children have taken."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(
    system: str, source: Path, model: ServedModel, work: Path, options: argparse.Namespace
) -> tuple[int, int, float, float, float]:
    """Start a system's server, let it serve the file, stop it; return the fields of ``Run``."""
    on_cpu = not cpu.has_cuda()
    is_ours = system != BASELINE
    flags = ["--model-path", model.path, "--log-level", "warning", "--enable-cache-report"]
    flags += ["--max-total-tokens", str(options.kv_tokens)]
    flags += ["--offline-policy", "coserve"] if is_ours else ["--schedule-policy", "lpm"]
    if system == "ours, Batch API":
        flags += ["--coserve-data-dir", str(work / f"data-{time.time_ns()}")]
    env = {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    module = "sglang_coserve.launch_server"
    if not is_ours:
        module = "stock_on_cpu" if on_cpu else "sglang.launch_server"
    if on_cpu:
        cpu.set_environment_defaults(env)
        flags = flags if is_ours else [*cpu.default_flags(), *flags]
    log = work / f"{system.replace(' ', '_')}.log"
    with (
        cpu.divided_cores(1) if on_cpu else nullcontext(),
        LocalServer(flags, module=module, log_path=log, extra_env=env) as server,
    ):
        warm = {"model": "default", "prompt": [FIRST_TOKEN_ID], "max_tokens": 2}
        httpx.post(f"{server.base_url}/v1/completions", json=warm, timeout=60, trust_env=False)
        httpx.post(f"{server.base_url}/flush_cache", params={"timeout": 30}, timeout=60)
        began_s, server_s, client_s = time.perf_counter(), cpu_s(server.pid), own_cpu_s()
        used = SYSTEMS[system](server, source, work)
        wall_s = time.perf_counter() - began_s
        server_s, client_s = cpu_s(server.pid) - server_s, own_cpu_s() - client_s
    assert len(used) == options.groups * options.members, f"{len(used)} lines were answered"
    cached = sum((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) for usage in used)
    total = sum(usage["prompt_tokens"] for usage in used)
    return total, cached, server_s, client_s, wall_s


def table_of(runs: Iterable[Run], options: argparse.Namespace) -> Table:
    """One row for each run."""
    perfect = options.groups * (options.members - 1) * options.prefix_tokens
    runs = list(runs)
    base = {run.repeat: run.server_cpu_s for run in runs if run.system == BASELINE}
    ratio = f"CPU time ÷ {BASELINE}"
    table = Table("repeat", "system", "cached", "of a perfect order's", "CPU s", ratio, "wall s")
    for run in runs:
        relative = f"{run.server_cpu_s / base[run.repeat]:.2f}" if run.repeat in base else ""
        table.add_row(
            str(run.repeat),
            run.system,
            f"{run.cached_tokens / run.prompt_tokens:.1%}",
            f"{run.cached_tokens / perfect:.1%}",
            f"{run.server_cpu_s:.0f}",
            relative,
            f"{run.wall_s:.0f}",
        )
    return table


def main() -> None:
    """Parse the flags, run, print the table, write the JSON after every run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--members", type=int, default=25, help="lines with the same prefix")
    parser.add_argument("--prefix-tokens", type=int, default=384)
    parser.add_argument("--suffix-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=1)
    parser.add_argument("--kv-tokens", type=int, default=8192, help="size of the KV pool")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the runs as JSON")
    options = parser.parse_args()
    console = Console()
    runs: list[Run] = []
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    with tempfile.TemporaryDirectory() as folder, terminate_as_interrupt():
        work = Path(folder)
        model = prepare_model(None, work)
        source = work / "in.jsonl"
        with source.open("w") as file:
            for number, tokens in enumerate(prompts(options, model.vocab_size)):
                line = line_of(number, tokens, options.output_tokens)
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
        order = [(n, system) for n in range(1, options.repeats + 1) for system in options.systems]
        for repeat, system in track(order, "runs", console=console):
            runs.append(Run(repeat, system, *measure(system, source, model, work, options)))
            if options.out is not None:
                record = {"settings": settings, "runs": [asdict(run) for run in runs]}
                options.out.write_text(json.dumps(record, indent=1) + "\n")
    console.print(table_of(runs, options))


if __name__ == "__main__":
    main()
