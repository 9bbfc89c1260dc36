"""Synthetic arrivals have the rate and the burstiness asked for."""

import math
from itertools import islice, repeat

import numpy as np
import pytest

from common.arrivals import gamma_arrivals, synthesize
from sglang_coserve.errors import ConfigError
from sglang_coserve.workload.trace import TraceRequest


def gaps(arrivals_s, n: int = 20_000) -> np.ndarray:
    return np.diff(np.fromiter(islice(arrivals_s, n + 1), dtype=np.float64))


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_gamma_gaps_have_the_mean_and_the_variation_asked_for(cv):
    sample = gaps(gamma_arrivals(rate_per_s=4.0, cv=cv, seed=11))
    # Five standard errors of the mean; the CV of a skewed sample settles more slowly.
    assert abs(sample.mean() * 4 - 1) < 5 * cv / math.sqrt(sample.size)
    assert sample.std() / sample.mean() == pytest.approx(cv, rel=0.05)


def test_no_variation_is_evenly_spaced():
    assert list(islice(gamma_arrivals(8.0, 0, seed=1), 4)) == [0.125, 0.25, 0.375, 0.5]


@pytest.mark.parametrize("rate", [0, -1, math.inf, math.nan])
def test_refuses_a_rate_that_is_none(rate):
    with pytest.raises(ConfigError, match="arrival rate"):
        gamma_arrivals(rate, 1.0, seed=0)


@pytest.mark.parametrize("cv", [-0.1, math.inf, math.nan])
def test_refuses_a_variation_that_is_none(cv):
    with pytest.raises(ConfigError, match="coefficient of variation"):
        gamma_arrivals(1.0, cv, seed=0)


def test_synthesize_pairs_times_and_lengths_until_one_ends():
    assert list(synthesize([0.5, 1.5], repeat((4096, 256)))) == [
        TraceRequest(0, 0.5, 4096, 256),
        TraceRequest(1, 1.5, 4096, 256),
    ]
    assert len(list(synthesize(gamma_arrivals(1.0, 1.0, 0), [(1, 1)] * 3))) == 3
