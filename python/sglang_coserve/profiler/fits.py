"""Fits every kind of latency model to measurements of a machine, and reads profile files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from sglang_coserve.core.latency_model.machine import HARDWARE, Hardware
from sglang_coserve.core.latency_model.model import Fit, LatencyModel, Sample, SampleTable
from sglang_coserve.core.latency_model.model_shape import ModelShape, find_model
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.latency_model.roofline import RooflineModel
from sglang_coserve.durable_files import replace as replace_file
from sglang_coserve.errors import CoserveError, InputFileError, unreadable
from sglang_coserve.latency_profile import LatencyProfile
from sglang_coserve.profiler.latency import ShapeTiming, repeat_error
from sglang_coserve.profiler.shapes import ShapeKind

# Start values for fitting a roofline on a device without a known datasheet.
_ANY_CPU: Final = Hardware(
    name="cpu",
    bf16_flop_per_s=1e11,
    memory_byte_per_s=2e10,
    link_byte_per_s=1e10,
    memory_bytes=16e9,
    source="assumed for any CPU; only the start of a fit",
)


ATTENTION_SETTINGS: Final = tuple(
    f"{phase}attention_backend" for phase in ("", "prefill_", "decode_")
)
"""Fields of ``ServerArgs`` that name the attention backend."""


@dataclass(frozen=True, slots=True)
class ProfiledMachine:
    """A model on a device, with everything that step times depend on."""

    hardware: str
    """Name of the GPU, or of the CPU with its cores and the threads used; of an emulated GPU it
    says so."""

    model: str
    """Path or name of the model, as given to SGLang."""

    tp_size: int
    sglang_version: str
    model_config: Mapping[str, object]
    """The model's config.json."""

    captured_batch_sizes: tuple[int, ...]
    """Batch sizes of the decode CUDA graphs, ascending; empty without graphs."""

    attention_backend: str = ""
    """SGLang's attention backend in effect; see ``attention_name``. Empty: unknown."""

    @property
    def datasheet(self) -> Hardware:
        """The device's peak performance; if unknown, assumed values to start a fit from."""
        name = self.hardware.lower()
        for known in HARDWARE.values():
            if re.search(rf"{known.name}(?!\d)", name):  # A GB200 has B200s; an A4000 is no A40.
                return known
        if "cpu" in name:
            return replace(_ANY_CPU, name=self.hardware)
        assumed = "an A100's peaks, assumed for an unknown GPU; only the start of a fit"
        return replace(HARDWARE["a100"], name=self.hardware, source=assumed)

    def roofline(self) -> RooflineModel:
        """Return the latency model of the datasheet; of an emulated model, that of the real one.

        Raises:
            ConfigError: the model's config.json has not what it needs.
        """
        emulated = self.model_config.get("emulation")
        if isinstance(emulated, Mapping):
            shape, tp_size = find_model(emulated["model"]), emulated["tp_size"]
        else:
            shape, tp_size = ModelShape.from_config(self.model_config), self.tp_size
        return RooflineModel.from_datasheet(shape, self.datasheet, tp_size=tp_size)


def load_profile(path: Path) -> LatencyProfile:
    """Read a profile that ``coserve profile`` wrote.

    Raises:
        InputFileError: the file cannot be read, or is not a profile.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(
            f"{unreadable(path, error)}: make a latency profile with coserve profile "
            "--model-path … -o FILE"
        ) from error
    return LatencyProfile.from_json(text, str(path))


def write_profile(profile: LatencyProfile, path: Path) -> None:
    """Write a profile: a reader sees the old file or the new one, also after a power failure."""
    replace_file(path, lambda file: file.write(profile.to_json().encode()), 0o666)


BEST: Final = "best"
"""Stands for the kind with the smallest error."""

KINDS: Final = (PolynomialModel.kind, RooflineModel.kind)


@dataclass(frozen=True, slots=True)
class FitAttempt:
    """A kind of model with its fit, or the reason why it could not be fitted."""

    kind: str
    fit: Fit[LatencyModel] | None
    problem: str = ""


def fit_all(
    samples: Iterable[Sample], machine: ProfiledMachine, *, seed: int = 0
) -> tuple[FitAttempt, ...]:
    """Fit both kinds, with the same held-out samples, so that their reports are comparable."""
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
        machine.attention_backend,
    )


def attention_name(settings: Mapping[str, Any]) -> str:
    """Name the attention backend of SGLang's settings, given as fields of ``ServerArgs``.

    Prefills and decodes may have backends of their own: ``"prefill fa3, decode flashinfer"``. An
    empty text means that the settings name none.
    """
    common = settings.get("attention_backend") or ""
    prefill = settings.get("prefill_attention_backend") or common
    decode = settings.get("decode_attention_backend") or common
    return str(prefill) if prefill == decode else f"prefill {prefill}, decode {decode}"


def _attempt(kind: str, machine: ProfiledMachine, table: SampleTable, seed: int) -> FitAttempt:
    try:
        return FitAttempt(kind, _form(kind, machine).fit(table, seed=seed))
    except CoserveError as error:
        return FitAttempt(kind, None, str(error))


def _form(kind: str, machine: ProfiledMachine) -> LatencyModel:
    if kind == RooflineModel.kind:
        return machine.roofline()
    return PolynomialModel.of(captured_batch_sizes=machine.captured_batch_sizes)


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
