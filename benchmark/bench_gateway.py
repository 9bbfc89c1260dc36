"""What a gateway costs: CPU time per line, lines a second, memory.

    python benchmark/bench_gateway.py --lines 10000 100000 --out gateway.json

Engines that compute nothing answer every line after a fixed time, so that all CPU time is that of
keeping batches. Measured are the processes of a gateway with some of them before it, and those of
a single server with the same Batch API, whose backend answers as they do: what HTTP to engines
and placement add. Each run is a batch of its own, in a new process on a new directory; its upload
counts too. Memory is the most that the process and its helpers had at once, seen every 50 ms; what
it was as the batch went on is written, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from common.input_file import COMPLETIONS, batch_line, completion_body
from common.results import write_results
from fleet_bench.fake_engine import ADMIN_KEY
from sglang_coserve.errors import CoserveError
from sglang_coserve.local_server import LocalServer
from sglang_coserve.tables import markdown_table, median_and_range

_POLL_S: Final = 0.05
_REPORT_S: Final = 30.0
_COLUMNS: Final = (
    "server",
    "lines",
    "CPU per line, µs",
    "lines/s",
    "most memory, MiB",
    "without helpers, MiB",
)
_HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class ServedBatch:
    """What one batch took."""

    server: str
    lines: int
    cpu_us_per_line: float
    lines_per_s: float
    most_memory_mib: float
    own_memory_mib: float
    """The most that the process had without its helpers, which check and sort the input."""

    memory_mib: Sequence[tuple[int, float, float]] = ()
    """Every 30 s: how many lines are done, memory then, that without the helpers."""


class _Meter:
    """CPU time and memory of a process and its children, those that have ended included."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._start_s = self._cpu_s()
        self.now_mib: tuple[float, ...] = (0.0, 0.0)
        """With and without the children."""

        self.most_mib: tuple[float, ...] = (0.0, 0.0)

    def look(self) -> None:
        """Note how much memory is taken now."""
        own = taken = self._process.memory_info().rss
        for process in self._process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                taken += process.memory_info().rss
        self.now_mib = (taken / (1 << 20), own / (1 << 20))
        self.most_mib = tuple(map(max, self.most_mib, self.now_mib))

    @property
    def cpu_s(self) -> float:
        """Since the start."""
        return self._cpu_s() - self._start_s

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status."""
    options = parse_options(argv)
    found: list[ServedBatch] = []
    try:
        for lines in options.lines:
            for _ in range(options.repeats):
                found += measured(options, lines)
    except CoserveError as error:
        print(f"bench_gateway: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench_gateway: interrupted", file=sys.stderr)
        if not found:
            return 130
    print(markdown_table(_COLUMNS, [_cells(runs) for runs in _alike(found)]))
    if options.out is not None:
        write_results(options.out, options, batches=[asdict(batch) for batch in found])
    return 0


def measured(options: argparse.Namespace, lines: int) -> list[ServedBatch]:
    """Serve a batch of so many lines by a single server, and by a gateway."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        work = Path(directory)
        source = work / "in.jsonl"
        _write(source, lines, options.prompt_chars)
        single: list[ServedBatch] = []
        alone = ("--coserve-data-dir", str(work / "single"), "--max-lines", str(lines))
        in_flight = ("--max-in-flight", str(options.in_flight))
        if not options.gateway_alone:
            with _fake(work, options, "single", *alone, *in_flight) as server:
                single.append(_served("single server", server, source, lines, options))
        urls = []
        for number in range(options.engines):
            engine = stack.enter_context(_fake(work, options, f"engine-{number}"))
            urls += ["--engine", engine.base_url]
        flags = [
            *("--coserve-data-dir", str(work / "gateway"), "--batch-max-lines", str(lines)),
            *("--batch-max-upload-mib", "1000000", "--log-level", "warning", *urls),
            *("--batch-max-in-flight", str(options.in_flight)),
        ]
        gateway = LocalServer(
            flags,
            log_path=work / "gateway.log",
            module="sglang_coserve.fleet",
            extra_env={"COSERVE_ENGINE_ADMIN_KEY": ADMIN_KEY},
        )
        with gateway:
            name = f"gateway, {options.engines} engines"
            return [*single, _served(name, gateway, source, lines, options)]


def _fake(work: Path, options: argparse.Namespace, name: str, *flags: str) -> LocalServer:
    path = os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")])
    return LocalServer(
        ["--line-s", str(options.line_s), *flags],
        log_path=work / f"{name}.log",
        module="fleet_bench.fake_engine",
        extra_env={"PYTHONPATH": path},
    )


def _served(
    name: str, server: LocalServer, source: Path, lines: int, options: argparse.Namespace
) -> ServedBatch:
    meter = _Meter(server.pid)
    start_s = time.monotonic()
    with httpx.Client(base_url=server.base_url, timeout=600.0, trust_env=False) as client:
        with source.open("rb") as content:
            upload = {"file": (source.name, content)}
            answer = client.post("/v1/files", data={"purpose": "batch"}, files=upload)
        wanted = {
            "input_file_id": answer.raise_for_status().json()["id"],
            "endpoint": COMPLETIONS,
            "completion_window": "24h",
        }
        batch: dict[str, Any] = client.post("/v1/batches", json=wanted).raise_for_status().json()
        path = f"/v1/batches/{batch['id']}"
        next_poll_s, next_report_s = 0.0, start_s + _REPORT_S
        memory: list[tuple[int, float, float]] = []
        while batch["status"] != "completed":
            is_late = time.monotonic() > start_s + options.timeout
            if batch["status"] in ("failed", "expired") or is_late:
                raise CoserveError(f"{name}: the batch is {batch['status']}: {batch['errors']}")
            time.sleep(_POLL_S)
            meter.look()
            if time.monotonic() >= next_poll_s:
                batch = client.get(path).raise_for_status().json()
                next_poll_s = time.monotonic() + 10 * _POLL_S
            if time.monotonic() >= next_report_s:
                next_report_s += _REPORT_S
                done, (all_mib, own_mib) = batch["request_counts"]["completed"], meter.now_mib
                memory.append((done, all_mib, own_mib))
                print(
                    f"bench_gateway: {name}: {batch['status']}, {done:,} of {lines:,} lines, "
                    f"{all_mib:.0f} MiB, {own_mib:.0f} without helpers",
                    file=sys.stderr,
                )
    counts = batch["request_counts"]
    if counts["completed"] != lines:
        raise CoserveError(f"{name}: {counts} of {lines} lines")
    return ServedBatch(
        name,
        lines,
        cpu_us_per_line=meter.cpu_s * 1e6 / lines,
        lines_per_s=lines / (time.monotonic() - start_s),
        most_memory_mib=meter.most_mib[0],
        own_memory_mib=meter.most_mib[1],
        memory_mib=memory,
    )


def _write(path: Path, lines: int, prompt_chars: int) -> None:
    with path.open("wb") as file:
        for number in range(lines):
            prompt = f"{number} ".ljust(prompt_chars, "x")
            file.write(batch_line(f"id-{number}", completion_body(prompt, 32)))


def _alike(found: Sequence[ServedBatch]) -> list[list[ServedBatch]]:
    runs: dict[tuple[str, int], list[ServedBatch]] = {}
    for batch in found:
        runs.setdefault((batch.server, batch.lines), []).append(batch)
    return list(runs.values())


def _cells(runs: Sequence[ServedBatch]) -> list[str]:
    return [
        runs[0].server,
        f"{runs[0].lines:,}",
        median_and_range([batch.cpu_us_per_line for batch in runs], "{:,.0f}"),
        median_and_range([batch.lines_per_s for batch in runs], "{:,.0f}"),
        f"{max(batch.most_memory_mib for batch in runs):.0f}",
        f"{max(batch.own_memory_mib for batch in runs):.0f}",
    ]


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        SystemExit: argparse refused it, or printed its help.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--lines", type=int, nargs="+", default=[10_000, 100_000], help="of a batch")
    add("--repeats", type=int, default=1, help="of each batch; the median and the range are told")
    add("--engines", type=int, default=2)
    add("--line-s", type=float, default=0.1, help="how long an engine has a line")
    add("--in-flight", type=int, default=256, help="lines at a time, at most")
    add("--prompt-chars", type=int, default=256)
    add("--gateway-alone", action="store_true", help="without the single server beside it")
    add("--timeout", type=float, default=3600.0, metavar="S", help="for a batch to be complete")
    add("--out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
