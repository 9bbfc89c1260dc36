"""Moving error of predictions, and when it counts as drift."""

from __future__ import annotations

import pytest

from sglang_coserve.core.learned_model import PredictionError


def observed(error: PredictionError, ratio: float, count: int) -> PredictionError:
    for _ in range(count):
        error.observe(ratio * 0.05, 0.05)
    return error


def test_early_on_it_is_the_plain_mean() -> None:
    error = PredictionError()
    error.observe(1.1, 1.0)
    error.observe(0.7, 1.0)
    assert error.mape == pytest.approx(0.2)
    assert error.bias == pytest.approx(-0.1)


def test_drift_needs_many_iterations_and_ends_when_predictions_are_good_again() -> None:
    error = PredictionError()
    assert not observed(error, 1.5, 99).has_drifted
    assert observed(error, 1.5, 1).has_drifted
    assert not observed(error, 1.0, 1000).has_drifted


@pytest.mark.parametrize(
    ("profile_mape", "ratio", "drifts"),
    [(None, 1.14, False), (0.1, 1.25, False), (0.1, 1.35, True)],
)
def test_the_limit_is_relative_to_the_profile(
    profile_mape: float | None, ratio: float, drifts: bool
) -> None:
    assert observed(PredictionError(profile_mape), ratio, 300).has_drifted is drifts


def test_one_stall_is_no_drift_and_slows_nothing_for_long() -> None:
    error = observed(PredictionError(), 1.02, 300)
    error.observe(0.001, 5.0)
    assert not error.has_drifted
    assert error.slowness <= 2.0
    error.observe(5.0, 0.001)
    assert not error.has_drifted
    for _ in range(30):
        error.observe(1.0, 1.5)
    assert error.slowness == pytest.approx(1.5, abs=0.05)


def test_a_drift_is_told_once_a_minute() -> None:
    error = observed(PredictionError(), 1.5, 300)
    assert (said := error.warning(10.0)) is not None
    assert "off by 50%" in said
    assert error.warning(69.0) is None
    assert error.warning(70.0) is not None
    assert observed(PredictionError(), 1.02, 300).warning(10.0) is None
