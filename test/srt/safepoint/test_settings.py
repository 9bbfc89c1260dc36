"""Which settings ask for safepoints, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"safepoint_interval": -1}, "--safepoint-interval must be greater than or equal to 0"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CoserveConfig(**values)


@pytest.mark.parametrize(
    "values",
    [{"offline_policy": "fifo"}, {"offline_policy": "conserve", "safepoint_interval": 0}],
)
def test_what_is_not_asked_for_leaves_the_model_alone(values: dict[str, Any]) -> None:
    from sglang_coserve.srt.safepoint.safepoints import Installed, install_safepoints

    nothing_to_install_into = object()
    assert install_safepoints(nothing_to_install_into, CoserveConfig(**values)) == Installed()


def test_what_is_asked_for_is_put_into_the_model() -> None:
    from sglang_coserve.srt.safepoint.safepoints import install_safepoints

    with pytest.raises(AttributeError, match="tp_worker"):
        install_safepoints(object(), CoserveConfig(offline_policy="conserve"))
