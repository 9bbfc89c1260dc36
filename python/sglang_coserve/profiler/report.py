"""Reports the quality of a profile: errors compared with noise, measured against predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sglang_coserve.errors import require
from sglang_coserve.profiler.executor import ShapeKind
from sglang_coserve.profiler.fits import FitAttempt
from sglang_coserve.profiler.latency import ShapeTiming, repeat_error

_COLORS: Final = {
    ShapeKind.PREFILL: "tab:blue",
    ShapeKind.DECODE: "tab:orange",
    ShapeKind.MIXED: "tab:green",
}


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


def write_plot(
    measurements: Sequence[ShapeTiming], attempts: Sequence[FitAttempt], path: Path
) -> None:
    """Plot measured against predicted seconds, one panel per kind; the suffix sets the format.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require("plot", "the plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fitted = [attempt for attempt in attempts if attempt.fit is not None]
    figure = Figure(figsize=(4 * max(1, len(fitted)), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, max(1, len(fitted)), squeeze=False, sharex=True, sharey=True)[0]
    measured_ms = [measurement.seconds * 1e3 for measurement in measurements]
    ends = [min(measured_ms), max(measured_ms)]
    for axis, attempt in zip(axes, fitted, strict=False):
        assert attempt.fit is not None
        model, report = attempt.fit.model, attempt.fit.report
        axis.plot(ends, ends, color="grey", linewidth=0.8)
        for kind, color in _COLORS.items():
            of_kind = [m for m in measurements if m.shape.kind is kind]
            axis.scatter(
                [m.seconds * 1e3 for m in of_kind],
                [model.predict(m.shape.stats) * 1e3 for m in of_kind],
                s=8,
                color=color,
                label=kind.value,
            )
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="measured (ms)",
            title=f"{attempt.kind}: MAPE {report.mape:.1%}",
        )
    axes[0].set_ylabel("predicted (ms)")
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
