"""Safepoints on one GPU: what they cost, and how soon an arrival gets the device.

    cd benchmark && python -m gpu.safepoint --model-path MODEL --load-format dummy \
        --out safepoint_gpu.json

Three parts, each written to the JSON file, and to a Markdown file beside it, as soon as it is
measured; what is in the file already is not measured again.

stream: the matrix products of the model's layers, nothing of SGLang, under the real gate with
    CUDA events. How long a safepoint keeps the host; how much longer a pass takes with
    safepoints every k layers and a run-ahead of d groups (the device idles if the host comes
    late); how long from the flag until the device is free.
decode: the same products as a decode step, as one CUDA graph and as one for each group of layers.
engine: the real engine, for each way to run prefills that has safepoints (eager, breakable
    graphs), with and without them. Offline prefills alone: the time per prompt token.
    Beside online arrivals: TTFT, and the delays that the server reports.

Without a GPU only "engine" runs, on the CPU: a rehearsal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.machine import describe_machine
from common.own_process import OwnProcess
from common.results import write_json
from gpu.measured_engine import MeasuredEngine, SystemSpec
from gpu.missing_parts import measure_missing
from sglang_coserve.srt.cpu import defaults as cpu
from sglang_coserve.tables import markdown_table

TARGETS: Final = {
    "delay_p99_ms": 8.0,  # ConServe, section 6: 13.
    "safepoint_us": 10.0,
    "overhead_share": 0.01,
}
GRAPHS: Final[Mapping[str, Mapping[str, Any]]] = {
    "eager": {"cuda_graph_backend_prefill": "disabled"},
    "breakable": {"cuda_graph_backend_prefill": "breakable"},
}
PARTS: Final = ("stream", "decode", "engine")


def percentiles(values: Sequence[float]) -> dict[str, float | int]:
    """Return the count, median and 99th percentile."""
    p50, p99 = np.percentile(values, [50, 99])
    return {"n": len(values), "p50": float(p50), "p99": float(p99)}


def measure_stream(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the part "stream"."""
    import torch

    from gpu.layer_stack import Stack, decoder_layers, safepoint_us

    layers = decoder_layers(args.model_path)
    rows = []
    for tokens in args.tokens:
        x = torch.randn(tokens, layers[0].hidden, device="cuda", dtype=torch.bfloat16)
        plain_ms = Stack(layers, 1, None).pass_ms(x, args.repeats)
        for interval, depth in itertools.product(args.intervals, args.depths):
            stack = Stack(layers, interval, depth)
            pass_ms = stack.pass_ms(x, args.repeats)
            delays = stack.delays_ms(x, pass_ms, 3 * args.repeats)
            stack.close()
            rows.append(
                {
                    "tokens": tokens,
                    "interval": interval,
                    "depth": depth,
                    "plain_ms": plain_ms,
                    "pass_ms": pass_ms,
                    "overhead_share": pass_ms / plain_ms - 1.0,
                    "flag_to_free_ms": percentiles(delays) if delays else None,
                }
            )
    return {"safepoint_us": safepoint_us(), "passes": rows}


def measure_decode(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the part "decode"."""
    from gpu.decode_graphs import measure_decode_graphs

    return measure_decode_graphs(args.model_path)


def measure_engine(args: argparse.Namespace, graphs: str, interval: int) -> dict[str, Any]:
    """Measure one engine, in a process of its own."""
    settings: dict[str, Any] = {
        "load_format": args.load_format,
        "sampling_backend": "pytorch",
        "chunked_prefill_size": args.chunk_tokens,
        **(GRAPHS[graphs] if cpu.has_cuda() else {}),
    }
    if args.attention_backend is not None:
        settings["attention_backend"] = args.attention_backend
    spec = SystemSpec(
        args.model_path,
        args.prompt_tokens,
        interval,
        args.slo_ttft_ms,
        online_tokens=args.online_tokens,
        settings=settings,
    )
    tokens, seconds = args.prompt_tokens, args.arrivals / args.arrivals_per_s
    with OwnProcess(MeasuredEngine, spec) as engine:
        engine.call("prefill_s", tokens)  # Kernels are tuned, the latency model is refined.
        times_s = [engine.call("prefill_s", tokens) for _ in range(args.offline_requests)]
        idle_ms = engine.call("idle_ttft_ms", 10)
        load = engine.call("load", seconds, args.arrivals_per_s, tokens)
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
    if stream := results.get("stream"):
        parts.append(
            f"A safepoint keeps the host for {stream['safepoint_us']:.1f} µs (target "
            f"{TARGETS['safepoint_us']:.0f})."
        )
        head = ("tokens", "every k layers", "run-ahead d", "pass, ms", "overhead")
        cells = [
            [
                *(str(row[name]) for name in ("tokens", "interval", "depth")),
                f"{row['pass_ms']:.2f}",
                f"{row['overhead_share']:+.2%}",
                _p50_p99(row["flag_to_free_ms"]),
            ]
            for row in stream["passes"]
        ]
        parts.append(markdown_table((*head, "flag to free device, P50 / P99 ms"), cells))
    if decode := results.get("decode"):
        cells = [[k, f"{v:.3f}" if isinstance(v, float) else str(v)] for k, v in decode.items()]
        parts.append(markdown_table(("a decode step", "found"), cells))
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
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--graphs", nargs="+", choices=tuple(GRAPHS), default=["breakable", "eager"])
    add("--attention-backend", help="SGLang's flag")
    add("--tokens", nargs="+", type=int, default=[512, 2048, 8192], help="of a pass (stream)")
    add("--intervals", nargs="+", type=int, default=[2, 4, 8], help="k, in layers (stream)")
    add("--depths", nargs="+", type=int, default=[0, 1, 2], help="d, in groups (stream)")
    add("--repeats", type=int, default=30, help="passes of each kind (stream)")
    add("--interval", type=int, default=4, help="k, in layers (engine)")
    add("--chunk-tokens", type=int, default=8192, help="of a prefill (engine)")
    add("--prompt-tokens", type=int, default=8192, help="of an offline request (engine)")
    add("--offline-requests", type=int, default=16, help="alone, one after the other (engine)")
    add("--online-tokens", type=int, default=512, help="of an online prompt (engine)")
    add("--arrivals", type=int, default=100, help="online requests (engine)")
    add("--arrivals-per-s", type=float, default=4.0, help="online requests (engine)")
    add("--slo-ttft-ms", type=float, default=50.0, help="an arrival later than that suspends")
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

    on_gpu = cpu.has_cuda()
    parts: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, measure in (("stream", measure_stream), ("decode", measure_decode)):
        if name in args.parts and on_gpu:
            parts[name] = partial(measure, args)
        elif name in args.parts:
            print(f"no CUDA device: the part {name!r} is left out")
    is_complete = measure_missing(parts, results, write)
    if "engine" in args.parts:
        engines = {
            f"{kind}, {interval}": partial(measure_engine, args, kind, interval)
            for kind in (args.graphs if on_gpu else ["eager"])
            for interval in (0, args.interval)
        }
        is_complete &= measure_missing(engines, results.setdefault("engine", {}), write)
    print(as_markdown(results))
    return int(not is_complete)


if __name__ == "__main__":
    sys.exit(main())
