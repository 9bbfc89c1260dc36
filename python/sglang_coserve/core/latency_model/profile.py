"""A measured latency model as a JSON document that people can read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Final

from sglang_coserve.core.latency_model.fitting import FitReport
from sglang_coserve.core.latency_model.json_object import JsonObject
from sglang_coserve.core.latency_model.linear import LinearModel
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.latency_model.protocol import (
    LatencyModel,
    coefficients,
    with_coefficients,
)
from sglang_coserve.core.latency_model.roofline import RooflineModel
from sglang_coserve.core.latency_model.split_linear import SplitLinearModel

__all__ = ["LatencyProfile"]

_SCHEMA_VERSION: Final = 1

_FROM_FORM: Final[Mapping[str, Callable[[JsonObject], LatencyModel]]] = MappingProxyType(
    {
        LinearModel.kind: LinearModel.from_form,
        PolynomialModel.kind: PolynomialModel.from_form,
        RooflineModel.kind: RooflineModel.from_form,
        SplitLinearModel.kind: SplitLinearModel.from_form,
    }
)


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """A latency model, what it was measured on, and how good it is."""

    latency_model: LatencyModel
    report: FitReport | None
    """None when nothing was measured, as for a roofline from the datasheet."""

    hardware: str
    model: str
    """The language model, by name or path."""

    tp_size: int
    sglang_version: str

    def to_json(self) -> str:
        """Return the profile as indented JSON; ``from_json`` gives an equal one."""
        document = {
            "schema_version": _SCHEMA_VERSION,
            "kind": self.latency_model.kind,
            "hardware": self.hardware,
            "model": self.model,
            "tp_size": self.tp_size,
            "sglang_version": self.sglang_version,
            "fit_report": None if self.report is None else asdict(self.report),
            "form": self.latency_model.form(),
            "coefficients": coefficients(self.latency_model),
        }
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> LatencyProfile:
        """Read what ``to_json`` wrote; ``source`` names the file in messages.

        Raises:
            InputFileError: not JSON, another schema version, an unknown kind,
                or a field that is missing or malformed.
        """
        document = JsonObject.parse(text, source)
        version = document.integer("schema_version")
        if version != _SCHEMA_VERSION:
            document.fail(
                "schema_version",
                f"{version} is not {_SCHEMA_VERSION}, which this version reads: profile again",
            )
        return cls(
            latency_model=_read_model(document),
            report=_read_report(document) if document.has("fit_report") else None,
            hardware=document.text("hardware"),
            model=document.text("model"),
            tp_size=document.integer("tp_size", minimum=1),
            sglang_version=document.text("sglang_version"),
        )


def _read_model(document: JsonObject) -> LatencyModel:
    kind = document.text("kind")
    if kind not in _FROM_FORM:
        document.fail("kind", f"unknown kind {kind!r}: use one of {', '.join(sorted(_FROM_FORM))}")
    model = _FROM_FORM[kind](document.child("form"))
    values = document.child("coefficients")
    for name in values.fields:
        # A misspelt optional name would otherwise silently cost nothing.
        if name not in model.coefficient_names:
            values.fail(name, f"a {kind} model has only {', '.join(model.coefficient_names)}")
    return with_coefficients(
        model, {name: values.number(name, minimum=0) for name in model.coefficient_names}
    )


def _read_report(document: JsonObject) -> FitReport:
    report = document.child("fit_report")
    return FitReport(
        fitted_samples=report.integer("fitted_samples", minimum=0),
        held_out_samples=report.integer("held_out_samples", minimum=0),
        mape=report.number("mape", minimum=0),
        p99_ape=report.number("p99_ape", minimum=0),
        bias=report.number("bias"),
        seed=report.integer("seed"),
    )
