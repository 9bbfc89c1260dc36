"""HyGen's predictor is fitted and predicts as its equation says."""

from __future__ import annotations

import pytest

from core.latency_model.latency_cases import as_samples, error_of, measure, random_batches
from paper.hygen_predictor import HygenModel
from sglang_coserve.core.step_stats import StepStats

MACHINE = HygenModel().with_coefficients(
    {
        "prefill_token_s": 2.5e-5,
        "prefill_token_squared_s": 2e-9,
        "prefill_request_s": 3e-4,
        "decode_token_s": 5e-8,
        "decode_token_squared_s": 2e-13,
        "decode_request_s": 2e-5,
        "iteration_s": 6e-3,
    }
)


def test_a_fit_recovers_the_coefficients() -> None:
    fit = HygenModel().fit(measure(MACHINE, random_batches(5000, seed=1), seed=2))
    assert error_of(fit.model, MACHINE, random_batches(2000, seed=3)) < 0.005


def test_a_prediction_is_the_sum_of_the_contributions() -> None:
    table = random_batches(50, seed=1)
    sums = MACHINE.contributions(table).sum(axis=1).tolist()
    for sample, seconds in zip(as_samples(table), sums, strict=True):
        assert MACHINE.predict(sample.batch) == pytest.approx(seconds)
    assert MACHINE.predict(StepStats()) == 0.0
