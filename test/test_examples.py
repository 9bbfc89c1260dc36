"""Examples that Hypothesis draws are the same in every run."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.internal.conjecture import providers


def test_examples_do_not_depend_on_what_is_imported() -> None:
    assert not len(providers._get_local_constants())


def test_examples_of_the_check_do_not_depend_on_chance() -> None:
    assert settings.get_profile("check").derandomize
    assert not settings.get_profile("explore").derandomize
