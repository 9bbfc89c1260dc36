"""Safepoints on one GPU: what they cost, and how soon an arrival gets the device.

    python benchmark/bench_safepoint_gpu.py --model-path MODEL --load-format dummy \
        --out results/safepoint_gpu.json

Two parts, each written to the JSON file, and to a Markdown file beside it, as soon as it is
measured; what is in the file already is not measured again.

stream: the matrix products of the model's layers, nothing of SGLang, under the real gate with
    CUDA events. How long a safepoint keeps the host; how much longer a pass takes with
    safepoints every k layers and a run-ahead of d groups (the device idles if the host comes
    late); how long from the flag until the device is free.
engine: the real engine, for each way to run prefills that has safepoints (eager, breakable
    graphs), with and without them. Offline prefills alone: the time per prompt token.
    Beside online arrivals: TTFT, and the delays that the server reports.

Without a GPU the part "stream" is left out, and "engine" runs on the CPU: a rehearsal.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from coserve_bench.machine import describe_machine
from sglang_coserve.config import CoserveConfig
from sglang_coserve.srt import cpu
from sglang_coserve.srt.safepoint.flag import PreemptionFlag
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted, add_safepoints
from sglang_coserve.srt.safepoint.local_gate import LocalGate
from sglang_coserve.srt.safepoint.run_ahead import RunAheadGate, cuda_events

TARGETS: Final = {
    "delay_p99_ms": 13.0,  # ConServe, section 6.
    "safepoint_us": 10.0,
    "overhead_share": 0.005,
}
GRAPHS: Final[Mapping[str, Mapping[str, Any]]] = {
    "eager": {"cuda_graph_backend_prefill": "disabled"},
    "breakable": {"cuda_graph_backend_prefill": "breakable"},
}
ANSWER_TIMEOUT_S: Final = 300


def percentiles(values: Sequence[float]) -> dict[str, float | int]:
    """Return the count, median and 99th percentile."""
    return {
        "n": len(values),
        "p50": float(np.percentile(values, 50)),
        "p99": float(np.percentile(values, 99)),
    }


# --- The stream ---------------------------------------------------------------------------


class DecoderLayer(nn.Module):  # type: ignore[misc]
    """The matrix products of a layer, without attention and norms."""

    def __init__(self, hidden: int, intermediate: int, kv_width: int) -> None:
        super().__init__()
        shapes = (
            (hidden, hidden + 2 * kv_width),
            (hidden, hidden),
            (hidden, 2 * intermediate),
            (intermediate, hidden),
        )
        self.weights = [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(shape[0] ** -0.5)
            for shape in shapes
        ]
        self.hidden, self.intermediate = hidden, intermediate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the next layer takes."""
        qkv, out, gate_up, down = self.weights
        x = x + (x @ qkv)[:, : self.hidden] @ out
        gate, up = (x @ gate_up).split(self.intermediate, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * up) @ down
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def decoder_layers(model_path: Path) -> list[DecoderLayer]:
    """Make the layers of the model, as its configuration gives them."""
    config = json.loads((model_path / "config.json").read_text())
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_width = config.get("num_key_value_heads", heads) * head_dim
    return [
        DecoderLayer(config["hidden_size"], config["intermediate_size"], kv_width)
        for _ in range(config["num_hidden_layers"])
    ]


class Stack:
    """Layers with safepoints; depth None leaves them out."""

    def __init__(self, layers: Sequence[DecoderLayer], interval: int, depth: int | None) -> None:
        self.layers = layers
        self.flag = PreemptionFlag(pinned=True)
        self.gate = None
        if depth is not None:
            self.gate = RunAheadGate(LocalGate(self.flag), self.flag, cuda_events(depth))
            add_safepoints(layers, interval, self.gate)

    def close(self) -> None:
        """Take the safepoints out of the layers again."""
        for layer in self.layers:
            if "forward" in vars(layer):
                del layer.forward

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def run(self, x: torch.Tensor, batch: int) -> None:
        """Launch an armed pass."""
        if self.gate is not None:
            self.gate.arm(batch)
        try:
            for layer in self.layers:
                x = layer(x)
        finally:
            if self.gate is not None:
                self.gate.disarm()

    def pass_ms(self, x: torch.Tensor, repeats: int) -> float:
        """Return the device's median time for a pass; the host waits for the end of each."""
        times = []
        for batch in range(1, repeats + 4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.run(x, batch)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return float(np.median(times[3:]))

    def delays_ms(self, x: torch.Tensor, pass_ms: float, repeats: int) -> list[float]:
        """Return times from the flag until the device is free, flags raised at random."""
        rng, delays = random.Random(0), []
        for batch in range(1, repeats + 1):
            self.flag.lower()
            raised = self._raise_after(rng.uniform(0.0, pass_ms * 1e-3), batch)
            try:
                self.run(x, batch)
            except ForwardPreempted:
                torch.cuda.synchronize()
                delays.append((time.perf_counter() - raised()) * 1e3)
            else:
                torch.cuda.synchronize()
                raised()
        return delays

    def _raise_after(self, delay_s: float, batch: int) -> Callable[[], float]:
        """Raise the flag from another thread; the returned function waits, and says when."""
        times: list[float] = []

        def arrive() -> None:
            time.sleep(delay_s)
            times.append(time.perf_counter())
            self.flag.raise_for(batch)

        thread = threading.Thread(target=arrive)
        thread.start()

        def raised_s() -> float:
            thread.join()
            return times[0]

        return raised_s


def safepoint_us(calls: int = 5000) -> float:
    """Return how long the host is kept at a safepoint of an armed batch that need not wait."""
    flag = PreemptionFlag(pinned=True)
    gate = RunAheadGate(LocalGate(flag), flag, cuda_events(1))
    gate.arm(1)
    times = []
    for number in range(calls):
        start_s = time.perf_counter()
        gate.reached(number)
        times.append(time.perf_counter() - start_s)
        if number % 16 == 0:
            torch.cuda.synchronize()
    return float(np.median(times)) * 1e6


def measure_stream(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the part "stream"."""
    layers = decoder_layers(args.model_path)
    hidden = layers[0].hidden
    rows = []
    for tokens in args.tokens:
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        plain = Stack(layers, 1, None)
        plain_ms = plain.pass_ms(x, args.repeats)
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


# --- The engine ---------------------------------------------------------------------------


def start_engine(args: argparse.Namespace, graphs: str, interval: int) -> Any:
    """Start the engine with safepoints every so many layers; 0: none."""
    from sglang_coserve.srt.engine import CoserveEngine

    settings = dict(GRAPHS[graphs]) if cpu.has_cuda() else {}
    if args.attention_backend is not None:
        settings["attention_backend"] = args.attention_backend
    return CoserveEngine(
        model_path=str(args.model_path),
        load_format=args.load_format,
        sampling_backend="pytorch",
        chunked_prefill_size=args.chunk_tokens,
        disable_radix_cache=True,
        coserve_config=CoserveConfig(
            offline_policy="coserve",
            slo_ttft_ms=args.slo_ttft_ms,
            safepoint_interval=interval,
        ),
        **settings,
    )


def prompt(rng: random.Random, tokens: int) -> list[int]:
    """Return a prompt that no cache knows."""
    return rng.choices(range(10, 500), k=tokens)


def params(max_new_tokens: int, *, offline: bool) -> dict[str, Any]:
    """Return greedy sampling parameters of a class."""
    mark = {"custom_params": {"coserve_class": "offline"}} if offline else {}
    return {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True, **mark}


async def prefill_offline(engine: Any, args: argparse.Namespace, rng: random.Random) -> float:
    """Return the time per prompt token of offline prefills alone, in microseconds."""
    prompts = [prompt(rng, args.prompt_tokens) for _ in range(args.offline_requests)]
    start_s = time.perf_counter()
    await asyncio.gather(
        *(
            engine.async_generate(input_ids=ids, sampling_params=params(1, offline=True))
            for ids in prompts
        )
    )
    return (time.perf_counter() - start_s) / sum(map(len, prompts)) * 1e6


async def ttft_ms(engine: Any, args: argparse.Namespace, rng: random.Random) -> float:
    """Return an online request's time to first token."""
    start_s = time.perf_counter()
    await engine.async_generate(
        input_ids=prompt(rng, args.online_tokens), sampling_params=params(1, offline=False)
    )
    return (time.perf_counter() - start_s) * 1e3


async def ttfts_beside_offline(
    engine: Any, args: argparse.Namespace, rng: random.Random
) -> list[float]:
    """Return the TTFTs of online requests that arrive during offline prefills."""

    async def keep_busy() -> None:
        while True:
            await prefill_offline(engine, args, rng)

    busy = asyncio.create_task(keep_busy())
    ttfts = []
    try:
        for _ in range(args.arrivals):
            await asyncio.sleep(rng.expovariate(args.arrivals_per_s))
            ttfts.append(await ttft_ms(engine, args, rng))
    finally:
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    return ttfts


def measure_engine(args: argparse.Namespace, graphs: str, interval: int) -> dict[str, Any]:
    """Measure one engine."""
    rng = random.Random(0)
    engine = start_engine(args, graphs, interval)
    run = engine.loop.run_until_complete
    try:
        run(prefill_offline(engine, args, rng))  # Kernels are tuned, the latency model is refined.
        per_token_us = [run(prefill_offline(engine, args, rng)) for _ in range(3)]
        idle = [run(ttft_ms(engine, args, rng)) for _ in range(10)]
        beside = run(asyncio.wait_for(ttfts_beside_offline(engine, args, rng), ANSWER_TIMEOUT_S))
        state = run(engine.tokenizer_manager.get_internal_state())[0]["coserve"]
    finally:
        engine.shutdown()
    return {
        "graphs": graphs,
        "interval": interval,
        "offline_us_per_token": float(np.median(per_token_us)),
        "idle_ttft_ms": percentiles(idle),
        "ttft_ms": percentiles(beside),
        "safepoints": state.get("safepoints", {}),
    }


# --- Results ------------------------------------------------------------------------------


def as_markdown(results: Mapping[str, Any]) -> str:
    """Return the results as tables."""
    machine = results["machine"]
    lines = [
        "# Safepoints on a GPU",
        "",
        f"`{results['command']}` on {machine['gpu'] or machine['processor']}, torch "
        f"{machine['torch']}, SGLang {machine['sglang']}.",
        "",
    ]
    if not machine["gpu"]:
        lines += ["**A rehearsal on a CPU: no figure here says anything about a GPU.**", ""]
    stream = results.get("stream")
    if stream:
        lines += [
            f"A safepoint keeps the host for {stream['safepoint_us']:.1f} µs (target "
            f"{TARGETS['safepoint_us']:.0f}).",
            "",
            "| tokens | every k layers | run-ahead d | pass, ms | overhead | flag to free device, "
            "p50 / p99 ms |",
            "|---|---|---|---|---|---|",
        ]
        for row in stream["passes"]:
            delay = row["flag_to_free_ms"]
            shown = f"{delay['p50']:.1f} / {delay['p99']:.1f}" if delay else "–"
            lines.append(
                f"| {row['tokens']} | {row['interval']} | {row['depth']} | {row['pass_ms']:.2f} | "
                f"{row['overhead_share']:+.2%} | {shown} |"
            )
        lines.append("")
    engines = results.get("engine", {})
    if engines:
        lines += [
            "| prefills | safepoints | offline, µs per token | TTFT idle p50, ms | TTFT beside "
            "offline, p50 / p99 ms | arrival to abort, p50 / p99 ms | aborts |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [_engine_line(row) for row in engines.values()]
    return "\n".join(lines).rstrip() + "\n"


def _engine_line(row: Mapping[str, Any]) -> str:
    state = row["safepoints"]
    delay = state.get("delays_ms", {}).get("arrival_to_abort", {})
    abort = f"{delay['p50']:.1f} / {delay['p99']:.1f}" if delay.get("n") else "–"
    every = f"every {row['interval']} layers" if row["interval"] else "none"
    return (
        f"| {row['graphs']} | {every} | {row['offline_us_per_token']:.2f} | "
        f"{row['idle_ttft_ms']['p50']:.1f} | {row['ttft_ms']['p50']:.1f} / "
        f"{row['ttft_ms']['p99']:.1f} | {abort} | {sum(state.get('aborts', {}).values())} |"
    )


def write(results: Mapping[str, Any], out: Path) -> None:
    """Write the JSON file, and the tables beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")
    out.with_suffix(".md").write_text(as_markdown(results))


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="directory of the model")
    add("--load-format", default="auto", help="dummy: random weights")
    add("--out", type=Path, required=True, help="JSON file to write")
    add("--parts", nargs="+", choices=("stream", "engine"), default=["stream", "engine"])
    add("--graphs", nargs="+", choices=tuple(GRAPHS), default=list(GRAPHS))
    add("--attention-backend", help="SGLang's flag")
    add("--tokens", nargs="+", type=int, default=[512, 2048, 8192], help="of a pass (stream)")
    add("--intervals", nargs="+", type=int, default=[2, 4, 8], help="k, in layers (stream)")
    add("--depths", nargs="+", type=int, default=[0, 1, 2], help="d, in groups (stream)")
    add("--repeats", type=int, default=30, help="passes of each kind (stream)")
    add("--interval", type=int, default=4, help="k, in layers (engine)")
    add("--chunk-tokens", type=int, default=8192, help="of a prefill (engine)")
    add("--prompt-tokens", type=int, default=8192, help="of an offline request (engine)")
    add("--offline-requests", type=int, default=16, help="at a time (engine)")
    add("--online-tokens", type=int, default=512, help="of an online prompt (engine)")
    add("--arrivals", type=int, default=100, help="online requests (engine)")
    add("--arrivals-per-s", type=float, default=4.0, help="online requests (engine)")
    add("--slo-ttft-ms", type=float, default=50.0, help="an arrival later than that aborts")
    return parser.parse_args()


def main() -> int:
    """Measure what is not in the file yet."""
    args = parse_args()
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    results |= {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine(),
        "targets": TARGETS,
    }
    if "stream" in args.parts and "stream" not in results:
        if cpu.has_cuda():
            results["stream"] = measure_stream(args)
            torch.cuda.empty_cache()
        else:
            print("no CUDA device: the part 'stream' is left out")
        write(results, args.out)
    if "engine" in args.parts:
        engines = results.setdefault("engine", {})
        graphs = args.graphs if cpu.has_cuda() else ["eager"]
        for kind, interval in itertools.product(graphs, (0, args.interval)):
            name = f"{kind}, {interval}"
            if name not in engines:
                engines[name] = measure_engine(args, kind, interval)
                write(results, args.out)
    print(args.out.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
