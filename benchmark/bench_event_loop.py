"""How long the server's event loop stands still while large things arrive.

    python benchmark/bench_event_loop.py --out results

For each load: P99 and longest latency of ``/health`` and gap of an online stream, beside a
window without it. The first load is none at all, which shows the noise. ``/health`` is
answered by the event loop alone here: otherwise it waits for a second. The engine computes with
one thread: with one a core, as is the default on a CPU, everything that runs beside it waits for
a core, and what is measured is the machine's scheduler.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console
from rich.markdown import Markdown

from common.batch_server import BatchServer
from common.model import prepare_model
from common.results import write_results
from loop_bench import probe
from loop_bench.loads import LOADS, Loads
from sglang_coserve.batch.data_directory import DataDirectory
from sglang_coserve.batch.owners import owner_of
from sglang_coserve.batch.record import FileRecord
from sglang_coserve.batch.store import file_rows
from sglang_coserve.batch.store.database import open_database
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.tables import markdown_table, median_and_range

NONE = "none (noise)"
NUM_FILES, NUM_BATCHES = 10_000, 100
HEADROOM_S = 120.0


def add_files(data: Path) -> None:
    """Put files into the database of a server that is not running; what they hold is missing."""
    directory = DataDirectory(data)
    directory.open()
    connection = open_database(directory.database)
    connection.execute("BEGIN")
    for number in range(NUM_FILES):
        file = FileRecord(
            id=f"file-{number:024x}",
            owner=owner_of(None),
            filename="batch_831661b121dc3d2946a6d0a1_error.jsonl",
            purpose="batch",
            size_bytes=1000,
            created_at_s=time.time(),
            expires_at_s=None,
        )
        file_rows.insert(connection, file)
    connection.execute("COMMIT")
    connection.close()
    directory.close()


def add_batches(server: BatchServer) -> None:
    """Make batches that fail with many errors."""
    content = b"no JSON\n" * 150
    file_id = server.client.files.create(file=("bad.jsonl", content), purpose="batch").id
    for _ in range(NUM_BATCHES):
        server.until(server.create(file_id), "failed", timeout_s=60.0)


def watch(loads: Loads, load: Callable[[Loads], None] | None, window_s: float) -> dict[str, float]:
    """Probe for a window, the load being repeated meanwhile."""
    command = [sys.executable, probe.__file__, loads.host, str(loads.port), str(window_s)]
    stop = threading.Event()

    def repeat() -> None:
        while load is not None and not stop.is_set():
            load(loads)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=window_s + HEADROOM_S, check=True
        )
    finally:
        stop.set()
        thread.join()
    found = json.loads(done.stdout)
    return {
        f"{name.removesuffix('_ms')} {what}": value
        for name, values in found.items()
        for what, value in (("p99", float(np.percentile(values, 99))), ("max", max(values)))
    }


def compare(loads: Loads, name: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return, for each repeat, the ratios of P99 and the differences of the longest."""
    load = LOADS.get(name)
    found: dict[str, list[float]] = {}
    for repeat in range(options.repeats):
        # Who comes first alternates, so that a slow change of the machine favours nobody.
        if repeat % 2 == 0:
            without, beside = (watch(loads, which, options.window) for which in (None, load))
        else:
            beside, without = (watch(loads, which, options.window) for which in (load, None))
        for what in without:
            is_p99 = what.endswith("p99")
            figure = beside[what] / without[what] if is_p99 else beside[what] - without[what]
            found.setdefault(f"{what} {'×' if is_p99 else '+ms'}", []).append(figure)
            found.setdefault(f"{what} ms", []).append(beside[what])
    return found


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """Return medians and ranges as Markdown."""
    columns = [f"{probe} {what}" for probe in ("health", "gap") for what in ("p99 ×", "max +ms")]
    rows = [
        [
            name,
            *(
                median_and_range(figures[column], "{:.2f}" if "×" in column else "{:.0f}")
                for column in columns
            ),
        ]
        for name, figures in found.items()
    ]
    return markdown_table(("beside", *columns), rows)


def main() -> None:
    """Parse the flags, run, write the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench-event-loop"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--window", type=float, default=15.0, metavar="S")
    parser.add_argument("--model-path", help="default: a random model of 4 layers")
    parser.add_argument("--only", nargs="+", choices=[NONE, *LOADS], default=[NONE, *LOADS])
    options = parser.parse_args()
    os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    os.environ["OMP_NUM_THREADS"] = "1"
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, list[float]]] = {}
    with terminate_as_interrupt(), tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        model = prepare_model(options.model_path, work)
        flags = ["--model-path", model.path, "--log-level", "error", "--offline-policy", "fifo"]
        server = BatchServer(flags, work / "data", options.out / "server.log", 300.0)
        add_files(work / "data")
        with server:
            address = urlsplit(server.base_url)
            loads = Loads(server, str(address.hostname), int(address.port or 80))
            add_batches(server)
            watch(loads, None, 5.0)  # Cold.
            for name in options.only:
                found[name] = compare(loads, name, options)
                write_results(options.out / "results.json", options, found=found)
                (options.out / "table.md").write_text(table(found) + "\n")
                print(name, {k: f"{statistics.median(v):.1f}" for k, v in found[name].items()})
    Console().print(Markdown((options.out / "table.md").read_text()))


if __name__ == "__main__":
    main()
