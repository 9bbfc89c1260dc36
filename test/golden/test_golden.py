"""Plans, columns, fields, headers and arguments are equal to the stored values.

A change with another value as its purpose runs: python test/golden/stored_values.py
"""

from __future__ import annotations

import pytest

from golden.stored_values import COMPUTED, stored


@pytest.mark.parametrize("name", COMPUTED)
def test_a_value_is_as_stored(name: str) -> None:
    assert COMPUTED[name]() == stored()[name]


def test_no_other_value_is_stored() -> None:
    assert list(stored()) == list(COMPUTED)
