"""A measured latency model as a human-readable JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from pydantic import AfterValidator, NonNegativeFloat, PositiveInt

from sglang_coserve.core.latency_model.machine import Hardware
from sglang_coserve.core.latency_model.model import FitReport, LatencyModel
from sglang_coserve.core.latency_model.model_shape import ModelShape
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.latency_model.roofline import RooflineModel
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import ConfigError, InputFileError
from sglang_coserve.json_documents import JsonDocument, read_json

_SCHEMA_VERSION: Final = 1
_LEAST_WORK: Final = {"a prefill": StepStats.of([(1, 0)]), "a decode": StepStats.of([], [1])}


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """A latency model, the setup that it was measured on, and its error."""

    latency_model: LatencyModel
    report: FitReport | None
    """None when nothing was measured, as for a roofline from the datasheet."""

    hardware: str
    model: str
    """The language model, by name or path."""

    tp_size: int
    sglang_version: str
    attention_backend: str = ""
    """SGLang's attention backend; empty in profiles of earlier versions."""

    def to_json(self) -> str:
        """Return the profile as indented JSON, from which ``from_json`` makes an equal one."""
        document = {
            "schema_version": _SCHEMA_VERSION,
            "kind": self.latency_model.kind,
            "hardware": self.hardware,
            "model": self.model,
            "tp_size": self.tp_size,
            "sglang_version": self.sglang_version,
            "attention_backend": self.attention_backend,
            "fit_report": None if self.report is None else asdict(self.report),
            "form": self.latency_model.form(),
            "coefficients": dict(self.latency_model.coefficients),
        }
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> LatencyProfile:
        """Read what ``to_json`` wrote; ``source`` names the file in messages.

        Raises:
            InputFileError: the text is not JSON or has another schema version, an
                unknown kind, a missing or malformed field, or work that takes no time.
        """
        document = _read(_Profile[Any], text, source)
        model = _form(document.kind, text, source)
        given, names = document.coefficients, model.coefficients
        for name in names:
            if name not in given:
                raise InputFileError(f"{source}: coefficients.{name}: this field is missing")
        for name in given:
            # A misspelt name would otherwise be ignored silently.
            if name not in names:
                raise InputFileError(
                    f"{source}: coefficients.{name}: a {document.kind} model has only "
                    f"{', '.join(names)}"
                )
        model = model.with_coefficients(given)
        for work, batch in _LEAST_WORK.items():
            if model.predict(batch) == 0:
                raise InputFileError(
                    f"{source}: coefficients: by them {work} takes no time: profile again"
                )
        return cls(
            model,
            document.fit_report,
            document.hardware,
            document.model,
            document.tp_size,
            document.sglang_version,
            document.attention_backend,
        )


def _this_version(version: int) -> int:
    if version != _SCHEMA_VERSION:
        raise ValueError(
            f"{version} is not {_SCHEMA_VERSION}, which this version reads: profile again"
        )
    return version


F = TypeVar("F")
D = TypeVar("D", bound=JsonDocument)


class _Profile(JsonDocument, Generic[F]):
    """A profile; its form depends on its kind."""

    schema_version: Annotated[int, AfterValidator(_this_version)]
    kind: Literal["polynomial", "roofline"]
    hardware: str
    model: str
    tp_size: PositiveInt
    sglang_version: str
    attention_backend: str = ""
    fit_report: FitReport | None = None
    form: F
    coefficients: dict[str, NonNegativeFloat]


def _ascending(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if list(sizes) != sorted(set(sizes)):
        raise ValueError("must ascend, without repetition")
    return sizes


class _GraphForm(JsonDocument):
    captured_batch_sizes: Annotated[tuple[PositiveInt, ...], AfterValidator(_ascending)]


class _RooflineForm(JsonDocument):
    shape: ModelShape
    hardware: Hardware
    tp_size: PositiveInt


def _read(kind: type[D], text: str, source: str) -> D:
    """Read a document; a part that checks itself names its field (``core.ranges``)."""
    try:
        return read_json(kind, text, source)
    except ConfigError as error:
        raise InputFileError(f"{source}: {error}") from error


def _form(kind: str, text: str, source: str) -> LatencyModel:
    """Return a model of the document's form, with default coefficients."""
    if kind == RooflineModel.kind:
        form = _read(_Profile[_RooflineForm], text, source).form
        try:
            return RooflineModel.from_datasheet(form.shape, form.hardware, tp_size=form.tp_size)
        except ConfigError as error:
            raise InputFileError(f"{source}: form.tp_size: {error}") from error
    sizes = _read(_Profile[_GraphForm], text, source).form.captured_batch_sizes
    return PolynomialModel.of(captured_batch_sizes=sizes)
