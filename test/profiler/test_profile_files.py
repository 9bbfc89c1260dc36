from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from profiler.modelled_executor import LIMITS, MACHINE, ModelledExecutor
from sglang_coserve.core.latency_model.machine import find_hardware
from sglang_coserve.core.latency_model.model_shape import find_model
from sglang_coserve.core.latency_model.roofline import RooflineModel
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import InputFileError
from sglang_coserve.profiler.fits import (
    KINDS,
    attention_name,
    choose,
    fit_all,
    load_profile,
    report_text,
    to_profile,
    write_profile,
)
from sglang_coserve.profiler.latency import ShapeTiming, measure_grid
from sglang_coserve.profiler.shapes import StepShape, plan_grid

FIRST = ShapeTiming(StepShape(prefills=((64, 0), (32, 128))), (0.5, 0.25))


@pytest.fixture(scope="module")
def measurements() -> list[ShapeTiming]:
    executor = ModelledExecutor(noise=0.01)
    shapes = plan_grid(LIMITS, 120)
    return list(measure_grid(executor, shapes, time_limit_s=10_000, clock=executor.clock))


def test_prefills_and_decodes_may_have_attention_backends_of_their_own() -> None:
    assert attention_name({"attention_backend": "fa3", "sampling_backend": "pytorch"}) == "fa3"
    split = {"attention_backend": "fa3", "decode_attention_backend": "flashinfer"}
    assert attention_name(split) == "prefill fa3, decode flashinfer"
    assert attention_name({"attention_backend": None}) == ""


def test_best_is_the_kind_with_the_least_error(measurements: list[ShapeTiming]) -> None:
    attempts = fit_all([m.sample for m in measurements], MACHINE)
    best = choose(attempts)
    fits = [attempt.fit for attempt in attempts if attempt.fit is not None]
    assert len(fits) == 2
    assert best.report.mape == min(fit.report.mape for fit in fits)
    # The machine is a polynomial: that kind is as good as the noise.
    assert best.model.kind == "polynomial"
    assert best.report.mape < 0.02
    assert choose(attempts, "roofline").model.kind == "roofline"


def test_a_kind_that_does_not_fit_is_told_and_left_out(measurements: list[ShapeTiming]) -> None:
    config = {**MACHINE.model_config, "architectures": ["GemmaForCausalLM"]}
    attempts = fit_all([m.sample for m in measurements], replace(MACHINE, model_config=config))
    text = report_text(measurements, attempts)
    assert "roofline" in text
    assert "GemmaForCausalLM" in text
    assert choose(attempts).model.kind == "polynomial"
    with pytest.raises(InputFileError, match="GemmaForCausalLM"):
        choose(attempts, "roofline")


def test_captured_batch_sizes_are_fitted_apart(measurements: list[ShapeTiming]) -> None:
    machine = replace(MACHINE, captured_batch_sizes=(1, 2, 4, 8, 16, 32, 64))
    model = choose(fit_all([m.sample for m in measurements], machine), "polynomial").model
    assert model.coefficients["graph_iteration_s"] > 0


@pytest.mark.parametrize(
    ("hardware", "flop_per_s", "source"),
    [
        ("NVIDIA H200", 989.5e12, "datasheet"),
        ("CPU AMD EPYC, 2 cores, 1 threads", 1e11, "assumed"),
        ("NVIDIA RTX 9999", 312e12, "unknown GPU"),
        ("NVIDIA RTX A4000", 312e12, "unknown GPU"),
        ("NVIDIA A40", 149.7e12, "datasheet"),
        ("NVIDIA GH200 480GB", 989.5e12, "datasheet"),
    ],
)
def test_datasheets(hardware: str, flop_per_s: float, source: str) -> None:
    datasheet = replace(MACHINE, hardware=hardware).datasheet
    assert datasheet.bf16_flop_per_s == flop_per_s
    assert source in datasheet.source


def test_of_an_emulated_model_the_datasheet_is_that_of_the_real_one() -> None:
    emulated = {"model": "llama-3.1-70b", "hardware": "h100", "tp_size": 4}
    machine = replace(
        MACHINE,
        hardware="h100, emulated",
        model_config={"architectures": ["EmulatedForCausalLM"], "emulation": emulated},
    )
    shape = find_model("llama-3.1-70b")
    real = RooflineModel.from_datasheet(shape, find_hardware("h100"), tp_size=4)
    batch = StepStats.of([(512, 0)], [1000] * 8)
    assert machine.roofline().predict(batch) == real.predict(batch)


def test_the_report_shows_errors_beside_the_noise_and_invents_none(
    measurements: list[ShapeTiming],
) -> None:
    text = report_text(measurements, fit_all([m.sample for m in measurements], MACHINE))
    head, *rows = text.splitlines()
    assert head.split()[:4] == ["kind", "MAPE", "P99", "bias"]
    assert [row.split()[0] for row in rows[:2]] == list(KINDS)
    assert rows[2].startswith("repeat error")
    assert f"{len(measurements)} measurements" in rows[3]
    text = report_text([FIRST], fit_all([FIRST.sample], MACHINE))
    assert "not measured: no shape was repeated" in text
    assert text.count("not fitted") == 2


def test_profiles_survive(measurements: list[ShapeTiming], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for attempt in fit_all([m.sample for m in measurements], MACHINE):
        assert attempt.fit is not None
        write_profile(to_profile(attempt.fit, MACHINE), path)
        profile = load_profile(path)
        assert profile == to_profile(attempt.fit, MACHINE)
    assert profile.latency_model.kind == attempt.fit.model.kind
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "coserve profile"), (b"\xff\xfe", "coserve profile"), (b"[]", "an object")],
)
def test_what_is_not_a_profile_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputFileError, match=rf"profile.json: .*{message}"):
        load_profile(path)
