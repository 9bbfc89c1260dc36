"""A fit against trying every set of positive coefficients."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_coserve.core.latency_model.linear import fit_relative


def error(relative: np.ndarray, x: np.ndarray) -> float:
    return float(((relative @ x - 1) ** 2).sum())


def least_by_enumeration(relative: np.ndarray) -> float:
    num_terms = relative.shape[1]
    best = float(len(relative))
    for size in range(1, num_terms + 1):
        for chosen in map(list, combinations(range(num_terms), size)):
            x = np.zeros(num_terms)
            x[chosen] = np.linalg.lstsq(relative[:, chosen], np.ones(len(relative)))[0]
            if (x >= 0).all():
                best = min(best, error(relative, x))
    return best


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_terms=st.integers(1, 6),
    correlation=st.floats(0, 0.999),
    decades=st.integers(0, 12),
)
def test_no_set_of_positive_coefficients_has_a_smaller_error(
    seed: int, num_terms: int, correlation: float, decades: int
) -> None:
    rng = np.random.default_rng(seed)
    terms = rng.normal(size=(20, num_terms)) + 30 * correlation * rng.normal(size=(20, 1))
    # A constant beside ΣP·(P + C): columns of one fit differ by as much.
    terms *= 10 ** np.linspace(0, decades, num_terms)
    seconds = np.exp(rng.normal(size=20))
    found = fit_relative(terms, seconds, [str(number) for number in range(num_terms)])
    x = np.array(list(found.values()))
    assert (x >= 0).all()
    relative = terms / seconds[:, np.newaxis]
    assert error(relative, x) <= least_by_enumeration(relative) + 1e-8
