"""Measures step times on this machine: runs a grid of batches, fits models, reports errors.

The executor that runs a batch is a protocol; the real one is in ``srt``.
"""

from sglang_coserve.profiler.executor import ExecutorLimits, ShapeExecutor, ShapeKind, StepShape
from sglang_coserve.profiler.fits import BEST, KINDS, FitAttempt, choose, fit_all, to_profile
from sglang_coserve.profiler.grid import plan_grid
from sglang_coserve.profiler.latency import (
    ShapeTiming,
    measure,
    measure_grid,
    quick_samples,
    repeat_error,
)
from sglang_coserve.profiler.profile_file import ProfiledMachine, load_profile, write_profile
from sglang_coserve.profiler.report import report_text, write_plot
from sglang_coserve.profiler.sample_file import SampleFile

__all__ = [
    "BEST",
    "KINDS",
    "ExecutorLimits",
    "FitAttempt",
    "ProfiledMachine",
    "SampleFile",
    "ShapeExecutor",
    "ShapeKind",
    "ShapeTiming",
    "StepShape",
    "choose",
    "fit_all",
    "load_profile",
    "measure",
    "measure_grid",
    "plan_grid",
    "quick_samples",
    "repeat_error",
    "report_text",
    "to_profile",
    "write_plot",
    "write_profile",
]
