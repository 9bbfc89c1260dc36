"""The active set method against trying every active set."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_coserve.core.latency_model.least_squares import solve_nonnegative


def by_enumeration(gram: np.ndarray, moment: np.ndarray) -> float:
    """The least objective over all sets of positive variables."""
    indices = range(len(moment))
    best = 0.0
    for subset in chain.from_iterable(combinations(indices, size) for size in indices):
        chosen = list(subset)
        best = min(best, objective_on(gram, moment, chosen))
    return min(best, objective_on(gram, moment, list(indices)))


def objective_on(gram: np.ndarray, moment: np.ndarray, chosen: list[int]) -> float:
    x = np.zeros(len(moment))
    if chosen:
        x[chosen] = np.linalg.solve(gram[np.ix_(chosen, chosen)], moment[chosen])
    return objective(gram, moment, x) if (x >= 0).all() else 0.0


def objective(gram: np.ndarray, moment: np.ndarray, x: np.ndarray) -> float:
    return float(x @ gram @ x / 2 - moment @ x)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    variables=st.integers(1, 6),
    correlation=st.floats(0, 0.999),
)
def test_solution_is_the_best_of_all_active_sets(
    seed: int, variables: int, correlation: float
) -> None:
    rng = np.random.default_rng(seed)
    columns = rng.normal(size=(20, variables)) + 30 * correlation * rng.normal(size=(20, 1))
    columns /= np.linalg.norm(columns, axis=0)
    gram = columns.T @ columns
    moment = columns.T @ rng.normal(size=20)
    x = solve_nonnegative(gram, moment)
    assert (x >= 0).all()
    best = by_enumeration(gram, moment)
    assert objective(gram, moment, x) <= best + 1e-8 * (1 + abs(best))
