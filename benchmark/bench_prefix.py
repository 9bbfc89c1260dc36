"""Shuffled offline lines that share prefixes: how much of their prompts the radix cache saves.

    python benchmark/bench_prefix.py --groups 60 --members 16 --suffix-tokens 64 --output-tokens 8 \
        --systems "stock fcfs" "stock lpm" "ours fifo" "ours coserve" --repeats 3 --out order.json
    python benchmark/bench_prefix.py --groups 400 --out file.json

Groups of lines share a long prefix, and the KV pool holds a few groups at a time. So what an
engine finds in its cache depends on the order in which it takes the lines (HyGen §4.3).
Compared, interleaved, on the same model with the same flags:

- all lines sent at once, which then wait in the server: stock SGLang, first come, first served
  (its default) and longest prefix match; ours with ``--offline-policy fifo`` and ``coserve``;
- far more lines than an engine has at a time: stock SGLang with longest prefix match, which gets
  them in the order of the file, 128 at a time (with more that wait it would go back to first come,
  first served); ours through the Batch API; ours without it, through ``coserve submit``.

Cached prompt tokens are shown beside those of a perfect order, which computes every prefix
once. CPU seconds are those of the server's processes, what orders the lines included where it
is one of them, from the first line until the last answer: other work on the machine does not
count. The client's are in the JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common.input_file import batch_line, completion_body
from common.model import ServedModel, prepare_model
from common.results import write_results
from sglang_coserve.demo.servers import make_server
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.local_server import LocalServer
from sglang_coserve.tables import median_and_range
from sglang_coserve.workload import FIRST_TEXT_TOKEN_ID

LINES_AT_STOCK: Final = 128
RUN_TIMEOUT_S: Final = 7200.0

Client = Callable[[LocalServer, Path, Path], list[dict[str, Any]]]
"""Takes a server, the file and a folder; returns what each line used."""


def by_http(concurrency: int | None, server: LocalServer, source: Path, work: Path) -> list[Any]:
    """Send the lines in the order of the file, so many at a time; None: all at once."""
    del work
    used: list[dict[str, Any]] = []

    async def run() -> None:
        limits = httpx.Limits(max_connections=concurrency)
        lines = iter(source.read_bytes().splitlines())
        async with (
            httpx.AsyncClient(
                base_url=server.base_url, timeout=RUN_TIMEOUT_S, limits=limits, trust_env=False
            ) as client,
            asyncio.TaskGroup() as workers,
        ):

            async def send(line: bytes) -> None:
                body = json.loads(line)["body"] | {"service_tier": "flex"}
                answer = await client.post("/v1/completions", json=body)
                used.append(answer.raise_for_status().json()["usage"])

            async def work_on() -> None:
                for line in lines:
                    await send(line)

            if concurrency is None:
                for line in lines:
                    workers.create_task(send(line))
            for _ in range(concurrency or 0):
                workers.create_task(work_on())

    asyncio.run(run())
    return used


def by_submit(flags: Sequence[str], server: LocalServer, source: Path, work: Path) -> list[Any]:
    """Let ``coserve submit`` with these flags take the file to its records."""
    output = work / f"out-{time.time_ns()}.jsonl"
    command = [sys.executable, "-m", "sglang_coserve", "submit", str(source), "-o", str(output)]
    command += ["--base-url", server.base_url, *flags]
    subprocess.run(command, check=True, timeout=RUN_TIMEOUT_S, stdout=subprocess.DEVNULL)
    with output.open("rb") as records:
        return [json.loads(record)["response"]["body"]["usage"] for record in records]


@dataclass(frozen=True, slots=True)
class PrefixSystem:
    """A server, and how the lines come to it."""

    flags: tuple[str, ...]
    client: Client
    has_batches: bool = False

    @property
    def is_ours(self) -> bool:
        """Our server; else stock SGLang's."""
        return "--offline-policy" in self.flags


AT_ONCE: Final = partial(by_http, None)
OURS: Final = ("--offline-policy", "coserve")
LPM: Final = ("--schedule-policy", "lpm")
SYSTEMS: Final[Mapping[str, PrefixSystem]] = {
    "stock fcfs": PrefixSystem(("--schedule-policy", "fcfs"), AT_ONCE),
    "stock lpm": PrefixSystem(LPM, AT_ONCE),
    "ours fifo": PrefixSystem(("--offline-policy", "fifo"), AT_ONCE),
    "ours coserve": PrefixSystem(OURS, AT_ONCE),
    "stock lpm, 128 lines": PrefixSystem(LPM, partial(by_http, LINES_AT_STOCK)),
    "ours, Batch API": PrefixSystem(
        OURS, partial(by_submit, ("--window", "24h")), has_batches=True
    ),
    "ours, coserve submit": PrefixSystem(OURS, partial(by_submit, ("--no-batch",))),
}
DEFAULT_SYSTEMS: Final = tuple(SYSTEMS)[4:]


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """What one system made of the file."""

    repeat: int
    system: str
    prompt_tokens: int
    cached_tokens: int
    server_cpu_s: float
    client_cpu_s: float
    wall_s: float


def lines_of(options: argparse.Namespace, vocab_size: int) -> Iterator[bytes]:
    """Yield the lines of all groups, shuffled."""
    rng = random.Random(options.seed)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(FIRST_TEXT_TOKEN_ID, vocab_size), k=count)

    heads = [tokens(options.prefix_tokens) for _ in range(options.groups)]
    prompts = [
        head + tokens(options.suffix_tokens) for head in heads for _ in range(options.members)
    ]
    rng.shuffle(prompts)
    for number, prompt in enumerate(prompts):
        yield batch_line(str(number), completion_body(prompt, options.output_tokens))


def cpu_s(pid: int) -> float:
    """Return what a process, its children and those of them that have ended have taken."""
    leader = psutil.Process(pid)
    total = 0.0
    for process in [leader, *leader.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def measure(
    repeat: int,
    name: str,
    source: Path,
    model: ServedModel,
    work: Path,
    options: argparse.Namespace,
) -> PrefixRun:
    """Start a system's server, let it serve the file, stop it."""
    system = SYSTEMS[name]
    flags = ["--model-path", model.path, "--log-level", "warning", "--enable-cache-report"]
    flags += ["--max-total-tokens", str(options.kv_tokens), *system.flags]
    if system.has_batches:
        flags += ["--coserve-data-dir", str(work / f"data-{time.time_ns()}")]
    log = work / f"{name.replace(' ', '_')}.log"
    with make_server(flags, is_ours=system.is_ours, log_path=log) as server:
        warm = {"model": "default", "prompt": [FIRST_TEXT_TOKEN_ID], "max_tokens": 2}
        httpx.post(f"{server.base_url}/v1/completions", json=warm, timeout=60, trust_env=False)
        httpx.post(f"{server.base_url}/flush_cache", params={"timeout": 30}, timeout=60)
        began_s, server_s, both_s = time.perf_counter(), cpu_s(server.pid), cpu_s(os.getpid())
        used = system.client(server, source, work)
        wall_s = time.perf_counter() - began_s
        # The server is a child of this process.
        server_s, both_s = cpu_s(server.pid) - server_s, cpu_s(os.getpid()) - both_s
    assert len(used) == options.groups * options.members, f"{len(used)} lines were answered"
    return PrefixRun(
        repeat,
        name,
        sum(usage["prompt_tokens"] for usage in used),
        sum((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) for usage in used),
        server_s,
        both_s - server_s,
        wall_s,
    )


def table_of(runs: Sequence[PrefixRun], options: argparse.Namespace) -> Table:
    """Medians with ranges; times also over those of the first system in the same repeat."""
    perfect = options.groups * (options.members - 1) * options.prefix_tokens
    first = options.systems[0]
    base = {run.repeat: run for run in runs if run.system == first}
    columns = ("system", "cached", "of a perfect order's", "CPU s", f"÷ {first}", "wall s")
    table = Table(*columns, f"÷ {first}")
    for name in dict.fromkeys(run.system for run in runs):
        own = [run for run in runs if run.system == name]
        table.add_row(
            name,
            median_and_range([run.cached_tokens / run.prompt_tokens for run in own], "{:.1%}"),
            median_and_range([run.cached_tokens / perfect for run in own], "{:.1%}"),
            median_and_range([run.server_cpu_s for run in own], "{:.0f}"),
            median_and_range([run.server_cpu_s / base[run.repeat].server_cpu_s for run in own]),
            median_and_range([run.wall_s for run in own], "{:.0f}"),
            median_and_range([run.wall_s / base[run.repeat].wall_s for run in own]),
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
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(DEFAULT_SYSTEMS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the runs as JSON")
    options = parser.parse_args()
    runs: list[PrefixRun] = []
    with tempfile.TemporaryDirectory() as folder, terminate_as_interrupt():
        work = Path(folder)
        model = prepare_model(None, work)
        source = work / "in.jsonl"
        with source.open("wb") as file:
            file.writelines(lines_of(options, model.vocab_size))
        order = [(n, system) for n in range(1, options.repeats + 1) for system in options.systems]
        for repeat, system in track(order, "runs", console=Console(stderr=True)):
            runs.append(measure(repeat, system, source, model, work, options))
            write_results(options.out, options, runs=[asdict(run) for run in runs])
    Console().print(table_of(runs, options))


if __name__ == "__main__":
    main()
