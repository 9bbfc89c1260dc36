"""Profiles survive the round trip, and bad ones are refused by file and field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from core.latency_model.latency_cases import (
    EAGER_POLYNOMIAL,
    MACHINES,
    POLYNOMIAL,
    ROOFLINE,
    machine_id,
    models,
)
from sglang_coserve.core.latency_model.model import FitReport, LatencyModel
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import InputFileError
from sglang_coserve.latency_profile import LatencyProfile

REPORT = FitReport(
    fitted_samples=800, held_out_samples=200, mape=0.012, p99_ape=0.05, bias=-0.001, seed=3
)


def profile(model: LatencyModel, report: FitReport | None = REPORT) -> LatencyProfile:
    return LatencyProfile(
        latency_model=model,
        report=report,
        hardware="h100",
        model="llama-3.1-8b",
        tp_size=2,
        sglang_version="0.5.17",
        attention_backend="fa3",
    )


@settings(deadline=None)
@given(models(), st.none() | st.just(REPORT))
def test_round_trip(model: LatencyModel, report: FitReport | None) -> None:
    assume(min(model.predict(StepStats.of(*one)) for one in ([[(1, 0)]], [[], [1]])) > 0)
    saved = profile(model, report)
    assert LatencyProfile.from_json(saved.to_json(), "profile.json") == saved


@pytest.mark.parametrize("model", MACHINES, ids=machine_id)
def test_any_field_may_be_missing_or_wrong_but_not_silently(model: LatencyModel) -> None:
    """Every leaf of the document, dropped or replaced by nonsense, is refused by name."""
    good = json.loads(profile(model).to_json())
    for path in leaves(good):
        # Profiles of earlier versions name no attention backend.
        for spoil in (nonsense,) if path == ["attention_backend"] else (dropped, nonsense):
            bad = json.loads(json.dumps(good))
            spoil(bad, path)
            with pytest.raises(InputFileError) as caught:
                LatencyProfile.from_json(json.dumps(bad), "profile.json")
            assert str(caught.value).startswith(f"profile.json: {'.'.join(path)}")


def leaves(node: dict[str, Any]) -> list[list[str]]:
    found = []
    for name, value in node.items():
        below = leaves(value) if isinstance(value, dict) else [[]]
        found += [[name, *path] for path in below]
    return found


def dropped(document: dict[str, Any], path: list[str]) -> None:
    for name in path[:-1]:
        document = document[name]
    del document[path[-1]]


def nonsense(document: dict[str, Any], path: list[str]) -> None:
    for name in path[:-1]:
        document = document[name]
    document[path[-1]] = {"a": True}


@pytest.mark.parametrize(
    ("model", "path", "value", "message"),
    [
        (EAGER_POLYNOMIAL, "schema_version", 2, "schema_version: 2 is not 1"),
        (
            EAGER_POLYNOMIAL,
            "kind",
            "cubic",
            "kind: must be 'polynomial' or 'roofline', found 'cubic'",
        ),
        (EAGER_POLYNOMIAL, "coefficients.iteration_s", 10**400, "must be a finite number"),
        (
            EAGER_POLYNOMIAL,
            "coefficients.iteration",
            1e-3,
            "coefficients.iteration: a polynomial model has only",
        ),
        (POLYNOMIAL, "form.captured_batch_sizes", [1, 4, 2], "captured_batch_sizes: must ascend"),
        (
            EAGER_POLYNOMIAL,
            "coefficients",
            dict.fromkeys(EAGER_POLYNOMIAL.coefficients, 0),
            "a prefill takes no time",
        ),
        (
            POLYNOMIAL,
            "coefficients",
            {name: float("graph" not in name) for name in POLYNOMIAL.coefficients},
            "by them a decode takes no time: profile again",
        ),
        (EAGER_POLYNOMIAL, "fit_report.mape", -0.1, "fit_report: mape must be greater than or"),
        (ROOFLINE, "form.shape.num_layers", 0, "model shape: num_layers must be greater than 0"),
        (
            ROOFLINE,
            "form.hardware.memory_bytes",
            -1.0,
            "hardware h100: memory_bytes must be greater than 0, found -1.0",
        ),
        (ROOFLINE, "form.tp_size", 3, "form.tp_size: 32 attention heads cannot be split"),
    ],
)
def test_a_wrong_value_is_named(
    model: LatencyModel, path: str, value: object, message: str
) -> None:
    document = json.loads(profile(model).to_json())
    *parents, last = path.split(".")
    node = document
    for name in parents:
        node = node[name]
    node[last] = value
    with pytest.raises(InputFileError, match=f"^a.json: .*{message}"):
        LatencyProfile.from_json(json.dumps(document), "a.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.json: not valid JSON"),
        ('{"kind": ', "a.json: not valid JSON"),
        (
            '{"schema_version": NaN}',
            "a.json: schema_version: .* integer, found nan",
        ),
        ("[1]", r"a.json: must be an object, found \[1\]"),
        ("[" * 100_000, "a.json: not valid JSON"),
        ("{}", "a.json: schema_version: this field is missing"),
    ],
)
def test_a_text_that_is_no_profile_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputFileError, match=f"^{message}"):
        LatencyProfile.from_json(text, "a.json")


def test_a_profile_of_an_earlier_version_still_loads() -> None:
    """The file is older than the attention backend."""
    text = """{
  "schema_version": 1, "kind": "polynomial", "hardware": "h100", "model": "llama-3.1-8b",
  "tp_size": 2, "sglang_version": "0.5.17", "fit_report": {"fitted_samples": 800,
  "held_out_samples": 200, "mape": 0.012, "p99_ape": 0.05, "bias": -0.001, "seed": 3},
  "form": {"captured_batch_sizes": [4, 8]},
  "coefficients": {"compute_token_s": 2.5e-05, "attention_pair_s": 8e-10,
  "context_token_s": 4e-08, "prefill_request_s": 0.0005, "decode_request_s": 2e-05,
  "iteration_s": 0.006, "graph_row_s": 1.5e-05, "graph_context_token_s": 4e-08,
  "graph_iteration_s": 0.004}
}"""
    model = replace(POLYNOMIAL, captured_batch_sizes=(4, 8))
    expected = replace(profile(model), attention_backend="")
    assert LatencyProfile.from_json(text, "profile.json") == expected
