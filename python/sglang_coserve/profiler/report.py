"""Reports the quality of a profile: errors compared with noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sglang_coserve.profiler.executor import ShapeKind
from sglang_coserve.profiler.fits import FitAttempt
from sglang_coserve.profiler.latency import ShapeTiming, repeat_error


def report_text(measurements: Sequence[ShapeTiming], attempts: Sequence[FitAttempt]) -> str:
    """Return a table of the held-out errors of every kind, with the repeat error below it."""
    lines = [f"{'kind':<14}{'MAPE':>9}{'P99':>9}{'bias':>9}   held-out error"]
    for attempt in attempts:
        if attempt.fit is None:
            lines.append(f"{attempt.kind:<14}  not fitted: {attempt.problem}")
            continue
        report = attempt.fit.report
        lines.append(
            f"{attempt.kind:<14}{report.mape:>9.2%}{report.p99_ape:>9.2%}{report.bias:>+9.2%}"
            f"   {report.held_out_samples} held out, {report.fitted_samples} fitted"
        )
    noise = repeat_error(measurements)
    noise_text = "not measured: no shape was repeated" if noise is None else f"{noise:.2%}"
    lines.append(f"repeat error  {noise_text:>9}   of the machine itself: no model can do better")
    counts = Counter(measurement.shape.kind for measurement in measurements)
    runs = sum(len(measurement.runs_s) for measurement in measurements)
    outliers = runs - sum(len(measurement.kept_s) for measurement in measurements)
    kinds = ", ".join(f"{counts[kind]} {kind.value}" for kind in ShapeKind)
    largest_s = max(measurement.seconds for measurement in measurements)
    lines.append(
        f"{len(measurements)} measurements ({kinds}), {runs} runs, {outliers} outliers left out; "
        f"longest step {largest_s * 1e3:,.1f} ms"
    )
    return "\n".join(lines) + "\n"
