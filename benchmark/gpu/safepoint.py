"""Safepoints on one GPU: what they cost, and how soon an arrival gets the device.

    cd benchmark && python -m gpu.safepoint --model-path MODEL --load-format dummy \
        --out safepoint_gpu.json

The real engine, for each way to run prefills that has safepoints (eager, breakable graphs), with
and without them. Offline prefills alone: the time per prompt token. Beside online arrivals: TTFT,
and the delays that the server reports. Each is written to the JSON file, and to a Markdown file
beside it, as soon as it is measured; what is in the file already is not measured again.

Without a GPU it is a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.machine import describe_machine
from common.own_process import OwnProcess
from common.results import measure_missing, write_json
from gpu.measured_engine import MeasuredEngine, SystemSpec
from sglang_coserve.srt.cpu import defaults as cpu
from sglang_coserve.terminal import markdown_table

TARGETS: Final = {"delay_p99_ms": 8.0}  # ConServe, section 6: 13.
GRAPHS: Final[Mapping[str, Mapping[str, Any]]] = {
    "eager": {"cuda_graph_backend_prefill": "disabled"},
    "breakable": {"cuda_graph_backend_prefill": "breakable"},
}
TTFT_MS: Final = 50.0
"""An arrival that would have its first token later suspends."""

ARRIVALS_PER_S: Final = 4.0


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What is asked of the engine."""

    chunk_tokens: int = 8192
    """Of a prefill."""

    prompt_tokens: int = 8192
    """Of an offline request."""

    offline_requests: int = 16
    """Alone, one after the other."""

    online_tokens: int = 512
    """Of an online prompt."""

    arrivals: int = 60
    interval: int = 4
    """Layers between safepoints."""


TINY: Final = EngineSizes(256, 256, 2, 16, 3, 2)


def percentiles(values: Sequence[float]) -> dict[str, float | int]:
    """Return the count, median and 99th percentile."""
    p50, p99 = np.percentile(values, [50, 99])
    return {"n": len(values), "p50": float(p50), "p99": float(p99)}


def measure_engine(
    args: argparse.Namespace, sizes: EngineSizes, graphs: str, interval: int
) -> dict[str, Any]:
    """Measure one engine, in a process of its own."""
    settings: dict[str, Any] = {
        "load_format": args.load_format,
        "sampling_backend": "pytorch",
        "chunked_prefill_size": sizes.chunk_tokens,
        **(GRAPHS[graphs] if cpu.has_cuda() else {}),
    }
    if args.attention_backend is not None:
        settings["attention_backend"] = args.attention_backend
    spec = SystemSpec(
        args.model_path,
        interval,
        TTFT_MS,
        online_tokens=sizes.online_tokens,
        settings=settings,
    )
    tokens, seconds = sizes.prompt_tokens, sizes.arrivals / ARRIVALS_PER_S
    with OwnProcess(MeasuredEngine, spec) as engine:
        engine.call("prefill_s", tokens)  # Kernels are tuned, the latency model is refined.
        times_s = [engine.call("prefill_s", tokens) for _ in range(sizes.offline_requests)]
        idle_ms = engine.call("idle_ttft_ms", 10)
        load = engine.call("load", seconds, ARRIVALS_PER_S, tokens)
        state = engine.call("status")
    return {
        "graphs": graphs,
        "interval": interval,
        "offline_us_per_token": statistics.median(times_s) / tokens * 1e6,
        "idle_ttft_ms": percentiles(idle_ms),
        "ttft_ms": percentiles(load.ttft_ms),
        "offline_tokens_per_s": load.offline_tokens / seconds,
        "safepoints": state,
    }


def as_markdown(results: Mapping[str, Any]) -> str:
    """Return the results as tables."""
    machine = results["machine"]
    parts = [
        "# Safepoints on a GPU",
        f"`{results['command']}` on {machine['gpu'] or machine['processor']}, torch "
        f"{machine['torch']}, SGLang {machine['sglang']}.",
    ]
    if not machine["gpu"]:
        parts.append("**A rehearsal on a CPU: no figure here says anything about a GPU.**")
    if engines := results.get("engine"):
        columns = (
            *("prefills", "safepoints", "offline, µs per token", "TTFT idle P50, ms"),
            *("TTFT beside offline, P50 / P99 ms", "arrival to stop, P50 / P99 ms", "suspended"),
        )
        parts.append(markdown_table(columns, [_cells(row) for row in engines.values()]))
    return "\n\n".join(parts) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    state = row["safepoints"]
    reason = "" if state.get("enabled", True) else f" (off: {state.get('reason')})"
    return [
        row["graphs"],
        (f"every {row['interval']} layers" if row["interval"] else "none") + reason,
        f"{row['offline_us_per_token']:.2f}",
        f"{row['idle_ttft_ms']['p50']:.1f}",
        _p50_p99(row["ttft_ms"]),
        _p50_p99(state.get("delays_ms", {}).get("arrival_to_stop")),
        str(sum(state.get("suspended", {}).values())),
    ]


def _p50_p99(values: Mapping[str, float] | None) -> str:
    return f"{values['p50']:.1f} / {values['p99']:.1f}" if values and values.get("n") else "–"


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="directory of the model")
    add("--load-format", default="auto", help="dummy: random weights")
    add("--out", type=Path, required=True, help="JSON file to write")
    add("--attention-backend", help="SGLang's flag")
    add("--tiny", action="store_true", help="tiny counts, to find faults")
    return parser.parse_args()


def main() -> int:
    """Measure what is not in the file yet; return 1 where a part failed."""
    args = parse_args()
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    results |= {"command": " ".join(["python", *sys.argv]), "machine": describe_machine()}
    results["targets"] = TARGETS

    def write() -> None:
        write_json(args.out, results)
        args.out.with_suffix(".md").write_text(as_markdown(results))

    kinds = ["breakable", "eager"] if cpu.has_cuda() else ["eager"]
    sizes = TINY if args.tiny else EngineSizes()
    engines = {
        f"{kind}, {interval}": partial(measure_engine, args, sizes, kind, interval)
        for kind in kinds
        for interval in (sizes.interval, 0)
    }
    is_complete = measure_missing(engines, results.setdefault("engine", {}), write)
    print(as_markdown(results))
    return int(not is_complete)


if __name__ == "__main__":
    sys.exit(main())
