"""Fits every kind of latency model to the same measurements, and says how good each fit is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sglang_coserve.core.latency_model.linear import (
    BROS,
    CONSERVE,
    FEATURE_SETS,
    HYGEN,
    LinearModel,
)
from sglang_coserve.core.latency_model.model import Fit, LatencyModel, Sample, SampleTable
from sglang_coserve.core.latency_model.profile import LatencyProfile
from sglang_coserve.core.latency_model.roofline import RooflineModel
from sglang_coserve.errors import CoserveError, InputFileError
from sglang_coserve.profiler.executor import ShapeKind
from sglang_coserve.profiler.latency import ShapeTiming, repeat_error
from sglang_coserve.profiler.profile_file import ProfiledMachine

BEST: Final = "best"
"""Stands for the kind with the smallest error."""

KINDS: Final = (CONSERVE.kind, HYGEN.kind, RooflineModel.kind, BROS.kind)


@dataclass(frozen=True, slots=True)
class FitAttempt:
    """A kind of model with its fit, or the reason why it could not be fitted."""

    kind: str
    fit: Fit[LatencyModel] | None
    problem: str = ""


def fit_all(
    samples: Iterable[Sample], machine: ProfiledMachine, *, seed: int = 0
) -> tuple[FitAttempt, ...]:
    """Fit all four kinds, with the same held-out samples, so that their reports are comparable."""
    table = SampleTable.of(samples)
    return tuple(_attempt(kind, machine, table, seed) for kind in KINDS)


def choose(attempts: Sequence[FitAttempt], kind: str = BEST) -> Fit[LatencyModel]:
    """Return the fit of this kind; for ``BEST`` the one with the least held-out MAPE.

    Raises:
        InputFileError: the kind, or every kind, could not be fitted.
    """
    wanted = [attempt for attempt in attempts if kind in (BEST, attempt.kind)]
    fits = [attempt.fit for attempt in wanted if attempt.fit is not None]
    if not fits:
        problems = "; ".join(f"{attempt.kind}: {attempt.problem}" for attempt in wanted)
        raise InputFileError(f"no latency model could be fitted: {problems}")
    return min(fits, key=lambda fit: fit.report.mape)


def to_profile(fit: Fit[LatencyModel], machine: ProfiledMachine) -> LatencyProfile:
    """Return the profile to be loaded by a server."""
    return LatencyProfile(
        fit.model,
        fit.report,
        machine.hardware,
        machine.model,
        machine.tp_size,
        machine.sglang_version,
    )


def _attempt(kind: str, machine: ProfiledMachine, table: SampleTable, seed: int) -> FitAttempt:
    try:
        return FitAttempt(kind, _form(kind, machine).fit(table, seed=seed))
    except CoserveError as error:
        return FitAttempt(kind, None, str(error))


def _form(kind: str, machine: ProfiledMachine) -> LatencyModel:
    if kind == RooflineModel.kind:
        return machine.roofline()
    features = FEATURE_SETS[kind]
    sizes = machine.captured_batch_sizes if features.replay_coefficients else ()
    return LinearModel.of(features, captured_batch_sizes=sizes)


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
