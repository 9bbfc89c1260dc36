"""What safepoints give an online arrival, and what they cost: engines side by side on a CPU.

    python benchmark/bench_safepoint.py --out benchmark/results/safepoint_cpu.json

The engines are the same but for the safepoints, and run in turn, the others stopped. Two of
them compute an offline prompt of about a second in one step (1 to 3); the others have the
default policy, which keeps steps short for those who may arrive (4 to 6).

1. overhead: arming a batch and passing its safepoints, as a part of the step;
2. the way from an arrival to the suspension, step by step;
3. TTFT of online requests that come somewhere in an offline prefill, and on the idle engine;
4. offline tokens per second beside one online arrival a second;
5. the idle engine: CPU time of the scheduler, and TTFT. Without safepoints its loop is SGLang's;
6. the load of 4 beside online requests that decode all the time.

Figures are medians, with ranges over the rounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.own_process import OwnProcess
from common.results import write_results
from safepoint_bench.system import MeasuredEngine, SafepointLoad, SystemSpec
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.progress_bar import progress_bar
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.tables import markdown_table, median_and_range

WITH, WITHOUT = "with", "without"
DECODING: Final = 2
PREFILL_S: Final = 1.0
CALIBRATION_TOKENS: Final = 1024
REST_TOKENS: Final = 64
"""What a prompt leaves of the context, for its output."""


@dataclass
class Figures:
    """What was measured, by system."""

    in_prefill_ms: dict[str, list[float]] = field(default_factory=lambda: {WITH: [], WITHOUT: []})
    idle_ms: dict[str, list[float]] = field(default_factory=lambda: {WITH: [], WITHOUT: []})
    idle_cpu: dict[str, list[float]] = field(default_factory=lambda: {WITH: [], WITHOUT: []})
    loads: dict[str, list[SafepointLoad]] = field(default_factory=lambda: {WITH: [], WITHOUT: []})
    mixed_loads: dict[str, list[SafepointLoad]] = field(
        default_factory=lambda: {WITH: [], WITHOUT: []}
    )
    """Beside online requests that decode all the time."""
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    interrupted: Mapping[str, Any] = field(default_factory=dict)
    """The status after the prefills that were suspended."""

    under_load: Mapping[str, Any] = field(default_factory=dict)
    """The status of the default engine after the loads of offline prompts alone."""


def main() -> None:
    """Run the benchmark; print tables, write the figures."""
    options = parse_options()
    shape = SmallModelSpec(hidden=options.hidden, layers=options.layers, context=options.context)
    with tempfile.TemporaryDirectory() as directory, terminate_as_interrupt():
        try:
            figures = measure(make_small_model(Path(directory) / "model", shape), options)
        except KeyboardInterrupt:
            print("interrupted: nothing was written", file=sys.stderr)
            raise SystemExit(130) from None
    summary = summarize(figures, options)
    print(table(summary))
    write_results(
        options.out,
        options,
        summary=summary,
        interrupted=figures.interrupted,
        under_load=figures.under_load,
        in_prefill_ms=figures.in_prefill_ms,
        idle_ms=figures.idle_ms,
        idle_cpu=figures.idle_cpu,
        loads=as_document(figures.loads),
        mixed_loads=as_document(figures.mixed_loads),
    )


def measure(model: Path, options: argparse.Namespace) -> Figures:
    """Run everything, the systems in turn."""
    figures = Figures()
    with ExitStack() as stack, progress_bar() as bar:
        steps = bar.add_task("starting", total=4 + options.rounds * (2 * options.requests + 8))

        def start(interval: int, *, is_long: bool) -> OwnProcess:
            ttft_ms = options.slo_ttft_ms if is_long else options.load_slo_ttft_ms
            bar.advance(steps)
            spec = SystemSpec(model, options.context, interval, ttft_ms, is_long)
            return stack.enter_context(OwnProcess(MeasuredEngine, spec, stops_when_idle=True))

        def measure_in_turn(
            text: str, pair: Mapping[str, OwnProcess], method: str, *arguments: Any
        ) -> dict[str, Any]:
            results = {}
            for name, system in pair.items():
                bar.update(steps, description=f"{text}, {name}")
                results[name] = system.call(method, *arguments)
                bar.advance(steps)
            return results

        long, default = (
            {WITH: start(options.interval, is_long=kind), WITHOUT: start(0, is_long=kind)}
            for kind in (True, False)
        )
        for system in (*long.values(), *default.values()):
            system.call("prefill_s", CALIBRATION_TOKENS)
        figures.prefill_tokens, figures.prefill_s = calibrate(long[WITHOUT], options.context)
        prefill = figures.prefill_tokens, figures.prefill_s
        load_arguments = options.load_seconds, 1.0, figures.prefill_tokens // 2
        for _ in range(options.rounds):
            for _ in range(options.requests):
                times = measure_in_turn("TTFT in a prefill", long, "ttft_in_prefill_ms", *prefill)
                for name, ttft_ms in times.items():
                    figures.in_prefill_ms[name].append(ttft_ms)
            for name, ttfts_ms in measure_in_turn(
                "idle TTFT", default, "idle_ttft_ms", options.requests
            ).items():
                figures.idle_ms[name] += ttfts_ms
            for name, share in measure_in_turn("idle CPU", default, "idle_cpu_share", 2.0).items():
                figures.idle_cpu[name].append(share)
            for name, load in measure_in_turn("load", default, "load", *load_arguments).items():
                figures.loads[name].append(load)
        figures.under_load = default[WITH].call("status")
        for _ in range(options.rounds):
            for name, load in measure_in_turn(
                "load beside decodes", default, "load", *load_arguments, DECODING
            ).items():
                figures.mixed_loads[name].append(load)
        figures.interrupted = long[WITH].call("status")
    return figures


def calibrate(system: OwnProcess, context: int) -> tuple[int, float]:
    """Return the length of a prompt that takes about a second to prefill, and how long it takes."""
    system.call("prefill_s", CALIBRATION_TOKENS)
    tokens = CALIBRATION_TOKENS
    for _ in range(3):
        seconds = min(system.call("prefill_s", tokens) for _ in range(2))
        tokens = max(64, min(int(tokens * (PREFILL_S / seconds) ** 0.8), context - REST_TOKENS))
    return tokens, min(system.call("prefill_s", tokens) for _ in range(3))


def summarize(figures: Figures, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures that the targets are about, each with its target."""
    status = figures.interrupted
    num_safepoints = -(-status["layers"] // status["interval_layers"])
    interval_ms = figures.prefill_s * 1e3 * status["interval_layers"] / status["layers"]
    ttft, idle = figures.in_prefill_ms, figures.idle_ms
    cost_ms = status["cost_us"] * num_safepoints / 1e3
    overhead_ms = status["arming_ms"]["p50"] + cost_ms
    delays = status["delays_ms"]
    rates = {
        name: [load.offline_tokens / load.seconds for load in loads]
        for name, loads in figures.loads.items()
    }
    loss = 1 - np.median(rates[WITH]) / np.median(rates[WITHOUT])
    mixed = [
        row(f"6. {figure}, {text}", value)
        for name, text in ((WITH, "with"), (WITHOUT, "without"))
        for figure, value in mixed_figures(figures.mixed_loads[name]).items()
    ]
    return {
        "prefill": {"tokens": figures.prefill_tokens, "seconds": figures.prefill_s},
        "interval_ms": interval_ms,
        "suspended": status["suspended"],
        "rows": [
            row("1. a safepoint", f"{status['cost_us']:.2f} µs", "≤ 2 µs"),
            row(
                "1. arming and safepoints, part of an iteration",
                f"{100 * overhead_ms / status['armed_batch_ms']['p50']:.3f}% "
                f"({overhead_ms * 1e3:.0f} µs of {status['armed_batch_ms']['p50']:.0f} ms)",
                "≤ 0.5%",
            ),
            row("2. arrival → flag", spread(delays["arrival_to_flag"])),
            row("2. flag → stop", spread(delays["flag_to_stop"])),
            row(
                "2. arrival → stop",
                spread(delays["arrival_to_stop"]),
                f"P99 ≤ {interval_ms + 2:.0f} ms",
            ),
            row("3. TTFT in a prefill, with", spread(percentiles(ttft[WITH]))),
            row("3. TTFT in a prefill, without", spread(percentiles(ttft[WITHOUT]))),
            row("3. TTFT on the idle engine, with", spread(percentiles(idle[WITH]))),
            row(
                "3. with / without",
                f"P50 {ratio(ttft, 50):.2f}, P99 {ratio(ttft, 99):.2f}",
                "P50 ≤ 0.15, P99 ≤ 0.3",
            ),
            row(
                "3. with, against 1.2 × idle + one interval",
                f"P50 {np.percentile(ttft[WITH], 50):.0f} ms",
                f"≤ {1.2 * np.percentile(idle[WITH], 50) + interval_ms:.0f} ms",
            ),
            row(
                f"4. offline tokens/s over {options.load_seconds:.0f} s, with",
                median_and_range(rates[WITH], "{:.0f}"),
            ),
            row("4. the same, without", median_and_range(rates[WITHOUT], "{:.0f}")),
            row("4. loss", f"{100 * loss:.1f}%", "≤ 10%"),
            row("4. suspensions", str(sum(figures.under_load["suspended"].values()))),
            row("4. online TTFT, with", spread(percentiles(all_ttft(figures.loads[WITH])))),
            row("4. online TTFT, without", spread(percentiles(all_ttft(figures.loads[WITHOUT])))),
            row("5. idle CPU, with", median_and_range(figures.idle_cpu[WITH], "{:.3f} cores")),
            row(
                "5. idle CPU, stock loop",
                median_and_range(figures.idle_cpu[WITHOUT], "{:.3f} cores"),
            ),
            row("5. idle TTFT, with", spread(percentiles(idle[WITH])), "not above stock"),
            row("5. idle TTFT, stock loop", spread(percentiles(idle[WITHOUT]))),
            *sorted(mixed, key=lambda line: line["figure"].split(",")[0]),
        ],
    }


def mixed_figures(loads: Sequence[SafepointLoad]) -> dict[str, str]:
    """Return what is told of loads beside online requests that decode."""
    return {
        "offline tokens/s beside decodes": median_and_range(
            [load.offline_tokens / load.seconds for load in loads], "{:.0f}"
        ),
        "online TTFT beside decodes": spread(percentiles(all_ttft(loads))),
        "gaps between decoded tokens": spread(
            percentiles([gap for load in loads for gap in load.gaps_ms])
        ),
    }


def as_document(loads: Mapping[str, Sequence[SafepointLoad]]) -> dict[str, list[dict[str, Any]]]:
    """Return loads as JSON can hold them."""
    return {name: [vars(load) for load in of_system] for name, of_system in loads.items()}


def row(name: str, value: str, target: str = "") -> dict[str, str]:
    """A line of the table."""
    return {"figure": name, "measured": value, "target": target}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the percentiles that are printed, and the number of values."""
    points = np.percentile(values, [50, 90, 99]).tolist()
    return {"n": len(values), **dict(zip(("p50", "p90", "p99"), points, strict=True))}


def spread(summary: Mapping[str, Any]) -> str:
    """Percentiles in milliseconds."""
    if not summary["n"]:
        return "none"
    values = " / ".join(f"{summary[name]:.3g}" for name in ("p50", "p90", "p99"))
    return f"{values} ms (P50 / P90 / P99 of {summary['n']})"


def ratio(values: Mapping[str, Sequence[float]], percentile: float) -> float:
    """Return a percentile with safepoints over the one without."""
    return float(
        np.percentile(values[WITH], percentile) / np.percentile(values[WITHOUT], percentile)
    )


def all_ttft(loads: Sequence[SafepointLoad]) -> list[float]:
    """Return the TTFT of all online requests."""
    return [value for load in loads for value in load.ttft_ms]


def table(summary: Mapping[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    prefill = summary["prefill"]
    about = (
        f"Offline prefill: {prefill['tokens']} tokens, {prefill['seconds']:.2f} s; one interval: "
        f"{summary['interval_ms']:.0f} ms; suspended: {summary['suspended']}"
    )
    rows = [[line["figure"], line["measured"], line["target"]] for line in summary["rows"]]
    return f"{about}\n\n{markdown_table(('figure', 'measured', 'target'), rows)}"


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of ``arguments``, those of the command line by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20, help="per round and measurement")
    parser.add_argument("--load-seconds", type=float, default=20.0)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=256)
    least = CALIBRATION_TOKENS + REST_TOKENS
    parser.add_argument("--context", type=int, default=4096, help=f"tokens, {least} at least")
    parser.add_argument("--interval", type=int, default=2, help="layers between safepoints")
    parser.add_argument("--slo-ttft-ms", type=float, default=50.0, help="in long iterations")
    parser.add_argument("--load-slo-ttft-ms", type=float, default=300.0, help="in the default ones")
    options = parser.parse_args(arguments)
    if options.context < least:
        parser.error(
            f"--context {options.context}: use {least} or more: "
            f"the first prompts have {CALIBRATION_TOKENS} tokens"
        )
    return options


if __name__ == "__main__":
    main()
