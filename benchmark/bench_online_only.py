"""Online-only traffic on our server and on stock SGLang, side by side.

    python benchmark/bench_online_only.py --repeats 3

Starts the two servers in turn (ours, stock, ours, stock, …) on the same small
model and sends each the same load with ``sglang.bench_serving``. Prints the
median of the runs with their range, and the ratio of each pair. A ratio of 1
within the range of the repeats means no measurable slowdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.local_server import LocalServer
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.srt import cpu

METRICS = ("mean_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "p99_itl_ms", "output_throughput")
RUN_TIMEOUT_S = 600


@contextmanager
def server(kind: str, model: Path, work: Path) -> Iterator[LocalServer]:
    """Start ours or stock with the same flags."""
    flags = ["--model-path", str(model), "--log-level", "warning"]
    module = "sglang_coserve.launch_server"
    if kind == "stock":
        # What our launcher defaults to on a CPU; torchvision needs our package imported first.
        module = "stock_on_cpu" if not cpu.has_cuda() else "sglang.launch_server"
        if not cpu.has_cuda():
            flags += cpu.default_flags()
    env: dict[str, str] = {"PYTHONPATH": str(Path(__file__).parent)}
    if not cpu.has_cuda():
        cpu.set_environment_defaults(env)
    cores = nullcontext() if cpu.has_cuda() else cpu.divided_cores(1)
    with (
        cores,
        LocalServer(flags, module=module, log_path=work / f"{kind}.log", extra_env=env) as running,
    ):
        yield running


def measure(
    running: LocalServer, model: Path, options: argparse.Namespace, out: Path
) -> dict[str, Any]:
    """Run bench_serving once after a warm-up run; return its metrics."""
    for num_prompts, path in ((8, out.with_suffix(".warmup")), (options.num_prompts, out)):
        command = [
            *(sys.executable, "-m", "sglang_coserve.srt.bench_serving", "--backend", "sglang"),
            *("--base-url", running.base_url, "--model", str(model)),
            *("--dataset-name", "random-ids", "--num-prompts", str(num_prompts)),
            *("--random-input-len", "256", "--random-output-len", "64"),
            *("--random-range-ratio", "0.5", "--request-rate", str(options.request_rate)),
            *("--seed", "1", "--output-file", str(path), "--disable-tqdm"),
        ]
        done = subprocess.run(command, timeout=RUN_TIMEOUT_S, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"bench_serving failed:\n{done.stderr[-2000:]}")
    metrics: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return metrics


def main() -> None:
    """Parse the flags, run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=150)
    parser.add_argument("--request-rate", type=float, default=4.0)
    parser.add_argument("--out", type=Path, help="write the runs as JSON")
    options = parser.parse_args()

    runs: dict[str, list[dict[str, Any]]] = {"coserve": [], "stock": []}
    with tempfile.TemporaryDirectory() as directory, terminate_as_interrupt():
        work = Path(directory)
        model = make_small_model(work / "model", SmallModelSpec())
        order = [kind for _ in range(options.repeats) for kind in ("coserve", "stock")]
        for i, kind in enumerate(track(order, "runs", console=Console(stderr=True))):
            with server(kind, model, work) as running:
                runs[kind].append(measure(running, model, options, work / f"{i}.jsonl"))

    table = Table(title=f"Online only, {options.request_rate:g} requests/s")
    for column in ("", "coserve", "stock", "ratio, pair by pair"):
        table.add_column(column, justify="right")
    for metric in METRICS:
        ours, stock = ([run[metric] for run in runs[kind]] for kind in ("coserve", "stock"))
        ratios = [a / b for a, b in zip(ours, stock, strict=True)]
        table.add_row(metric, spread(ours, 1), spread(stock, 1), spread(ratios, 3))
    Console().print(table)
    if options.out:
        kept = {
            kind: [{metric: run[metric] for metric in METRICS} for run in kind_runs]
            for kind, kind_runs in runs.items()
        }
        options.out.write_text(json.dumps(kept, indent=2) + "\n")


def spread(values: list[float], digits: int) -> str:
    """Median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


if __name__ == "__main__":
    main()
