"""Refining follows a machine that changed and shrugs off measurements that are wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latency_cases import (
    EAGER_POLYNOMIAL,
    MACHINES,
    POLYNOMIAL,
    BatchLengths,
    any_batch,
    as_samples,
    error_of,
    machine_id,
    measure,
    models,
    random_batches,
)

from sglang_coserve.core.latency_model.model import LatencyModel, Sample
from sglang_coserve.core.latency_model.refiner import Refiner
from sglang_coserve.core.step_stats import StepStats

CHECK = random_batches(1000, seed=99)


def scaled(machine: LatencyModel, *factors: float) -> LatencyModel:
    """The machine with its coefficients multiplied, the factors repeated as needed."""
    values = machine.coefficients
    cycle = [factors[i % len(factors)] for i in range(len(values))]
    return machine.with_coefficients(
        {name: value * f for (name, value), f in zip(values.items(), cycle, strict=True)}
    )


def refined(model: LatencyModel, samples: list[Sample]) -> LatencyModel:
    refiner = Refiner(model)
    for sample in samples:
        refiner.refine(sample)
    return refiner.model


@pytest.mark.parametrize("profiled", MACHINES, ids=machine_id)
@pytest.mark.parametrize("factors", [(2.0,), (0.6,), (1.6, 1.1, 0.8)], ids=str)
def test_refining_converges_to_a_changed_machine(
    profiled: LatencyModel, factors: tuple[float, ...]
) -> None:
    machine = scaled(profiled, *factors)
    assert error_of(profiled, machine, CHECK) > 0.05
    samples = as_samples(measure(machine, random_batches(800, seed=1), seed=2))
    assert error_of(refined(profiled, samples), machine, CHECK) < 0.025


@pytest.mark.parametrize("profiled", MACHINES, ids=machine_id)
def test_a_machine_that_changes_while_serving_is_followed(profiled: LatencyModel) -> None:
    machine = scaled(profiled, 1.6)
    calm = as_samples(measure(profiled, random_batches(600, seed=1), seed=2))
    slow = as_samples(measure(machine, random_batches(400, seed=3), seed=4))
    assert error_of(refined(profiled, calm + slow), machine, CHECK) < 0.05


@pytest.mark.parametrize("profiled", MACHINES, ids=machine_id)
@pytest.mark.parametrize("outlier", [10.0, 0.1], ids=str)
def test_refining_survives_a_fifth_of_gross_outliers(
    profiled: LatencyModel, outlier: float
) -> None:
    machine = scaled(profiled, 1.5)
    table = measure(machine, random_batches(1500, seed=1), seed=2)
    wrong = np.random.default_rng(3).random(len(table)) < 0.2
    samples = as_samples(replace(table, seconds=table.seconds * np.where(wrong, outlier, 1.0)))
    # Unweighted, a fifth of tenfold errors would shift predictions by half.
    assert error_of(refined(profiled, samples), machine, CHECK) < 0.04


def test_one_absurd_measurement_changes_next_to_nothing() -> None:
    refiner = Refiner(POLYNOMIAL)
    for sample in as_samples(measure(POLYNOMIAL, random_batches(300, seed=1), seed=2)):
        refiner.refine(sample)
    batch = StepStats.of([(700, 100)], [900] * 20)
    before_s = refiner.model.predict(batch)
    after = refiner.refine(Sample(batch, 1000 * before_s))
    assert after.predict(batch) == pytest.approx(before_s, rel=0.005)


def test_work_that_is_not_observed_follows_the_machine() -> None:
    """A machine at half speed, seen through decodes only, is not trusted with fast prefills."""
    machine = scaled(EAGER_POLYNOMIAL, 2.0)
    decodes = random_batches(600, seed=1, prefills=False)
    model = refined(EAGER_POLYNOMIAL, as_samples(measure(machine, decodes, seed=2)))
    prefill = StepStats.of([(2000, 0)])
    assert model.predict(prefill) > 1.7 * EAGER_POLYNOMIAL.predict(prefill)


def test_work_once_observed_is_not_forgotten_for_lack_of_it() -> None:
    machine = scaled(POLYNOMIAL, 1.6, 1.1, 0.8)
    mixed = as_samples(measure(machine, random_batches(800, seed=1), seed=2))
    decodes = as_samples(measure(machine, random_batches(150, seed=3, prefills=False), seed=4))
    model = refined(POLYNOMIAL, mixed + decodes)
    assert error_of(model, machine, CHECK) < 0.06


@settings(max_examples=50, deadline=None)
@given(
    models(),
    st.lists(
        st.tuples(any_batch.filter(lambda batch: not batch.stats.is_empty), st.floats(1e-9, 1e6)),
        min_size=1,
        max_size=30,
    ),
    any_batch,
)
def test_any_history_leaves_a_sound_model(
    model: LatencyModel, history: list[tuple[BatchLengths, float]], probe: BatchLengths
) -> None:
    refiner = Refiner(model)
    for batch, seconds in history:
        if model.predict(batch.stats) > 0:
            refiner.refine(Sample(batch.stats, seconds))
    # The model's own invariant, finite and non-negative coefficients, is checked as it is made.
    smaller, larger = probe.stats, probe.stats.with_prefill(10, 10).with_decode(10)
    assert 0 <= refiner.model.predict(smaller) <= refiner.model.predict(larger)
