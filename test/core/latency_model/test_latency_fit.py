"""Fits recover known machines, report honestly, and refuse what cannot be known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from latency_cases import (
    CAPTURED,
    EAGER_POLYNOMIAL,
    MACHINES,
    POLYNOMIAL,
    error_of,
    machine_id,
    measure,
    random_batches,
    unfitted,
)

from sglang_coserve.core.latency_model.model import FitReport, LatencyModel, Sample, SampleTable
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import InputFileError

# The mean absolute value of normal noise of 3%.
NOISE_MAPE = 0.03 * np.sqrt(2 / np.pi)


@pytest.mark.parametrize("machine", MACHINES, ids=machine_id)
def test_fit_recovers_the_machine(machine: LatencyModel) -> None:
    samples = measure(machine, random_batches(5000, seed=1), seed=2)
    fit = unfitted(machine).fit(samples)
    assert error_of(fit.model, machine, random_batches(2000, seed=3)) < 0.005
    assert fit.report.mape == pytest.approx(NOISE_MAPE, rel=0.1)
    assert fit.report.p99_ape == pytest.approx(0.03 * 2.576, rel=0.2)
    assert abs(fit.report.bias) < 0.004
    assert (fit.report.fitted_samples, fit.report.held_out_samples) == (4000, 1000)


def test_the_split_is_seeded() -> None:
    table = measure(EAGER_POLYNOMIAL, random_batches(400, seed=1), seed=2)
    form = PolynomialModel.of()
    assert form.fit(table, seed=7) == form.fit(table, seed=7)
    assert form.fit(table, seed=7).report != form.fit(table, seed=8).report


def test_a_report_counts_under_prediction_as_negative_bias() -> None:
    report = FitReport.measure(np.array([0.9, 0.9]), np.array([1.0, 1.0]), fitted_samples=8, seed=0)
    assert (report.mape, report.bias) == pytest.approx((0.1, -0.1))
    assert str(report).startswith("MAPE 10.00%, P99 10.00%, bias -10.00% on 2 held-out samples")


def test_the_relative_error_counts_not_the_absolute() -> None:
    """A misfit of long batches must not drown short ones."""
    table = random_batches(4000, seed=1)
    exact = EAGER_POLYNOMIAL.contributions(table).sum(axis=1)
    # Half of the batches run at twice the cost: relative least squares settles
    # where both halves are off by the same share, whatever their lengths.
    slow = np.random.default_rng(2).random(len(table)) < 0.5
    fit = PolynomialModel.of().fit(replace(table, seconds=exact * np.where(slow, 2.0, 1.0)))
    # min Σ(x/t − 1)² over x for t in {1, 2} is x = (1 + 1/2) / (1 + 1/4) = 1.2.
    ratio = fit.model.contributions(table).sum(axis=1) / exact
    assert ratio.mean() == pytest.approx(1.2, abs=0.03)
    assert ratio.std() < 0.05


def test_coefficients_stay_non_negative_where_the_data_fall() -> None:
    """More decode requests at the same keys make this machine faster; the model must not say so."""
    table = random_batches(3000, seed=1)
    exact = (
        EAGER_POLYNOMIAL.contributions(table).sum(axis=1) + 4e-3 - 2e-5 * 2 * table.decode_requests
    )
    model = PolynomialModel.of().fit(replace(table, seconds=exact)).model
    assert model.coefficients["decode_request_s"] == 0
    assert all(value >= 0 for value in model.coefficients.values())


def test_replayed_graphs_are_fitted_apart() -> None:
    """An eager polynomial cannot follow steps at the captured sizes; with the sizes it can."""
    coarse = replace(
        POLYNOMIAL.with_coefficients({"graph_row_s": 2e-4}), captured_batch_sizes=(64, 128, 256)
    )
    table = random_batches(5000, seed=1)
    replayed_s = coarse.contributions(table)[:, -3:].sum(axis=1)
    # Without mixed batches at the lower bound, which is not part of the fit.
    kept = np.flatnonzero((table.prefill_requests == 0) | (replayed_s == 0))
    both = measure(coarse, table.take(kept), seed=2, noise=0.001)
    apart = unfitted(coarse).fit(both)
    together = PolynomialModel.of().fit(both)
    assert apart.report.mape < 0.002
    assert together.report.mape > 0.05
    sixty_five = StepStats.of([], [100] * 65)
    assert (
        apart.model.predict(sixty_five) - apart.model.predict(StepStats.of([], [100] * 64))
        > 60 * 2e-4
    )


def test_decodes_beyond_the_captured_sizes_run_eagerly() -> None:
    model = replace(POLYNOMIAL, captured_batch_sizes=(4,))
    eager = replace(POLYNOMIAL, captured_batch_sizes=())
    five = StepStats.of([], [100] * 5)
    assert model.predict(five) == eager.predict(five)
    assert model.predict(StepStats.of([], [100] * 4)) < eager.predict(five)


def grid(
    prompts: list[tuple[int, int]], decodes: list[list[int]], *, mixed: bool = False
) -> SampleTable:
    """Batches of one and of two equal prompts, of decodes, and of one prompt with decodes."""
    batches = [StepStats.of([prompt] * count) for prompt in prompts for count in (1, 2)]
    batches += [StepStats.of([], contexts) for contexts in decodes]
    if mixed:
        batches += [StepStats.of([prompts[0]], contexts) for contexts in decodes]
    return SampleTable.of([Sample(batch, 0.01) for batch in batches])


def one_request_each(prompts: list[tuple[int, int]], contexts: list[int]) -> SampleTable:
    batches = [StepStats.of([prompt]) for prompt in prompts]
    batches += [StepStats.of([], [context]) for context in contexts]
    return SampleTable.of([Sample(batch, 0.01) for batch in batches])


LENGTHS = (16, 64, 128, 512, 1024, 2048, 3000)
PROMPTS = [(length, 0) for length in LENGTHS]
DEEP_PROMPTS = [(length, context) for length in LENGTHS for context in (0, 900, 8000)]
DECODES = [[context] * n for context in (10, 500, 4000) for n in (1, 3, 8, 20)]


@pytest.mark.parametrize(
    ("form", "table", "message"),
    [
        pytest.param(
            PolynomialModel.of(), grid([], DECODES[:1]), r"1 given.*at least 2", id="one sample"
        ),
        pytest.param(
            PolynomialModel.of(),
            grid(PROMPTS[:1], DECODES[:3]),
            r"4 left to fit 6",
            id="few samples",
        ),
        pytest.param(
            PolynomialModel.of(),
            grid([], DECODES),
            r"no batch does the work that prefill_request_s prices",
            id="no prefill",
        ),
        pytest.param(
            PolynomialModel.of(captured_batch_sizes=CAPTURED),
            grid(DEEP_PROMPTS, []),
            r"graph_row_s, graph_context_token_s, graph_iteration_s",
            id="no decode-only batch",
        ),
        pytest.param(
            PolynomialModel.of(),
            grid(PROMPTS, []),
            r"no batch does the work that decode_request_s prices",
            id="no decode",
        ),
        pytest.param(
            PolynomialModel.of(captured_batch_sizes=CAPTURED),
            grid(DEEP_PROMPTS, DECODES),
            r"no batch does the work that decode_request_s prices",
            id="no decode beside a prefill",
        ),
        pytest.param(
            PolynomialModel.of(),
            one_request_each(DEEP_PROMPTS, [500, 600, 700, 4000]),
            r"do not tell prefill_request_s, decode_request_s, iteration_s apart",
            id="one request a batch",
        ),
        pytest.param(
            PolynomialModel.of(),
            grid([(100, 50)] * 20, [[10, 10]] * 20),
            r"do not tell .* apart: vary",
            id="two batches, many times",
        ),
    ],
)
def test_samples_that_determine_nothing_are_refused(
    form: LatencyModel, table: SampleTable, message: str
) -> None:
    with pytest.raises(InputFileError, match=message):
        form.fit(table)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused_by_sample(seconds: float) -> None:
    good = Sample(StepStats.of([(10, 0)]), 0.01)
    with pytest.raises(InputFileError, match="seconds is not a positive number in sample 2"):
        SampleTable.of([good, good, Sample(good.batch, seconds)])


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(InputFileError, match="empty in sample 1"):
        SampleTable.of([Sample(StepStats.of([(10, 0)]), 0.01), Sample(StepStats(), 0.01)])
