"""Step ``profile``: the (P, C) grid on the real model runner, and how well each model fits."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coserve_bench.table import markdown_table
from gpu.task import Task, run_step
from sglang_coserve import profiler
from sglang_coserve.srt.executor_process import ExecutorProcesses

TARGET_MAPE: Final = 0.02
"""HyGen reports 1.1 to 1.8%, ConServe less than 4%."""

_MEASURE_S: Final = 240.0
_DRY_MEASURE_S: Final = 12.0
_SHAPES: Final = 400
_FIT_S: Final = 15.0
"""What fitting and plotting take at the end."""


def measure(task: Task) -> bool:
    """Measure the grid for four minutes in all, and fit."""
    samples = task.folder / "profile.samples.jsonl"
    limit_s = _DRY_MEASURE_S if task.dry_run else _MEASURE_S
    earlier_s = float(task.figures.get("measured_s", 0.0))
    flags = ["--model-path", str(task.model_path()), "--log-level", "error", *task.server_flags()]
    with ExecutorProcesses(flags) as executor:
        machine = executor.machine
        shapes = profiler.plan_grid(executor.limits, 30 if task.dry_run else _SHAPES)
        time_s = max(1.0, min(limit_s - earlier_s, task.remaining_s - _FIT_S))
        with profiler.SampleFile(samples, machine, resume=True) as file:
            before = len(file.measurements)
            for measurement in profiler.measure_grid(
                executor, shapes, time_limit_s=time_s, done=tuple(file.measurements)
            ):
                file.append(measurement)
            measurements = file.measurements
    print(f"{len(measurements)} measurements, {before} of them from an earlier attempt", flush=True)
    attempts = profiler.fit_all([m.sample for m in measurements], machine, seed=0)
    print(profiler.report_text(measurements, attempts), flush=True)
    chosen = profiler.choose(attempts)
    profile = task.folder / "profile.json"
    profiler.write_profile(profiler.to_profile(chosen, machine), profile)
    profiler.write_plot(measurements, attempts, task.folder / "profile.png")
    figures = {
        **figures_of(measurements, attempts, chosen.model.kind),
        "measured_s": earlier_s + time_s,
        "hardware": machine.hardware,
        "captured_batch_sizes": machine.captured_batch_sizes,
        "profile": profile.read_text(),
    }
    task.report(figures, table(figures))
    return figures["measured_s"] >= limit_s or len(measurements) >= len(shapes)


def figures_of(
    measurements: Sequence[profiler.Measurement],
    attempts: Sequence[profiler.FitAttempt],
    chosen: str,
) -> dict[str, Any]:
    """Return held-out errors of every model, and what no model can be better than."""
    fits: dict[str, Any] = {}
    for attempt in attempts:
        if attempt.fit is None:
            fits[attempt.kind] = {"problem": attempt.problem}
            continue
        report, model = attempt.fit.report, attempt.fit.model
        errors = {kind: [] for kind in profiler.BatchKind}  # type: dict[profiler.BatchKind, list[float]]
        for m in measurements:
            errors[m.shape.kind].append(abs(model.predict(m.shape.stats) / m.seconds - 1.0))
        fits[attempt.kind] = {
            "mape": report.mape,
            "p99_ape": report.p99_ape,
            "bias": report.bias,
            "held_out": report.held_out_samples,
            "fitted": report.fitted_samples,
            # Of all samples: shows which batches a model does not understand.
            "mape_by_batch": {k.value: sum(e) / len(e) for k, e in errors.items() if e},
        }
    return {
        "chosen": chosen,
        "fits": fits,
        "repeat_error": profiler.repeat_error(measurements),
        "measurements": len(measurements),
        "longest_ms": max(m.seconds for m in measurements) * 1e3,
        "target_mape": TARGET_MAPE,
        "is_met": fits[chosen]["mape"] <= TARGET_MAPE,
    }


def table(figures: Mapping[str, Any]) -> str:
    """Return the errors of every model."""
    rows = []
    for kind, fit in figures["fits"].items():
        if "problem" in fit:
            rows.append([kind, f"not fitted: {fit['problem']}", *[""] * 5])
            continue
        by_batch = fit["mape_by_batch"]
        rows.append(
            [
                kind + (" (chosen)" if kind == figures["chosen"] else ""),
                f"{fit['mape']:.2%}",
                f"{fit['p99_ape']:.2%}",
                f"{fit['bias']:+.2%}",
                *(_percent(by_batch.get(k.value)) for k in profiler.BatchKind),
            ]
        )
    noise = figures["repeat_error"]
    note = (
        f"{figures['measurements']} measurements; longest iteration {figures['longest_ms']:.1f} "
        f"ms; repeat error {_percent(noise) or 'not measured'}; target of the MAPE "
        f"{figures['target_mape']:.0%}."
    )
    columns = ("model", "held-out MAPE", "P99", "bias", *(k.value for k in profiler.BatchKind))
    return f"{markdown_table(columns, rows)}\n\n{note}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def existing_profile(task: Task) -> Path | None:
    """Return the profile that this step left, for other steps; None where there is none."""
    path = task.of("profile") / "profile.json"
    return path if path.is_file() else None


if __name__ == "__main__":
    sys.exit(run_step(measure))
