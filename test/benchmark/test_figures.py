"""Figures against what they should be, and their table."""

from __future__ import annotations

import pytest

from common.figures import Figure, markdown


def test_a_figure_is_judged_by_its_median() -> None:
    assert Figure("rate", "lines/s", (1.0, 60.0, 70.0), at_least=50).is_met is True
    assert Figure("delay", "ms", (100.0, 300.0, 400.0), at_most=200).is_met is False
    assert Figure("lost", "", (0,), at_most=0).is_met is True
    assert Figure("size", "MB", (5.0,)).is_met is None
    with pytest.raises(AssertionError):
        Figure("nothing", "", ())


def test_the_table_shows_medians_ranges_and_targets() -> None:
    figures = [
        Figure("validation", "lines/s", (90_000.0, 80_000.0, 100_000.0), at_least=50_000),
        Figure("lost", "", (3,), at_most=0),
    ]
    _, _, first, second = markdown(figures).splitlines()
    assert first == "| validation | 90,000 lines/s | 80,000–100,000 | 3 | ≥ 50,000 | yes |"
    assert second == "| lost | 3 |  | 1 | ≤ 0 | **no** |"
