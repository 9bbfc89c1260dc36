"""Fields with a range take its finite numbers only; a fault names the field and the value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from sglang_coserve.core.ranges import NOT_NEGATIVE, POSITIVE, SHARE, check_ranges
from sglang_coserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Settings:
    budget_s: Annotated[float | None, POSITIVE] = None
    requests: Annotated[int, POSITIVE] = 1
    picks: Annotated[int, NOT_NEGATIVE] = 0
    ratio: Annotated[float, SHARE] = 0.5
    seed: int = -1

    def __post_init__(self) -> None:
        check_ranges(self, "settings: {}".format)


@pytest.mark.parametrize(
    "given",
    [{}, {"budget_s": 1}, {"budget_s": 1e-9}, {"ratio": 0}, {"ratio": 1.0}, {"picks": 10**400}],
)
def test_a_value_in_its_range_is_taken(given: dict[str, Any]) -> None:
    Settings(**given)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"budget_s": 0}, "budget_s must be greater than 0, found 0"),
        ({"budget_s": float("nan")}, "budget_s must be a finite number, found nan"),
        ({"budget_s": float("inf")}, "budget_s must be a finite number, found inf"),
        ({"budget_s": 10**400}, "budget_s must be a finite number, found 1000"),
        ({"budget_s": "5"}, "budget_s must be a valid number, found '5'"),
        ({"requests": 2.0}, "requests must be a valid integer, found 2.0"),
        ({"requests": True}, "requests must be a valid integer, found True"),
        ({"requests": None}, "requests must be a valid integer, found null"),
        ({"picks": -1}, "picks must be greater than or equal to 0, found -1"),
        ({"ratio": 1.5}, "ratio must be less than or equal to 1, found 1.5"),
        ({"ratio": False}, "ratio must be a valid number, found False"),
    ],
)
def test_a_fault_names_the_field_and_the_value(given: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=f"^settings: {fault}"):
        Settings(**given)
