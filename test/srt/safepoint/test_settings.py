"""Which settings ask for safepoints, and which are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"safepoint_interval": -1}, "--safepoint-interval must be a number of layers"),
        (
            {"safepoint_mode": "shrink", "safepoint_decode_graphs": True},
            "--safepoint-mode shrink and --safepoint-decode-graphs exclude each other",
        ),
        ({"safepoint_mode": "halt"}, "--safepoint-mode must be one of auto, abort, shrink"),
        ({"safepoint_wasted_share": 0.0}, "--safepoint-wasted-share must be a number above 0"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CoserveConfig(**values)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"offline_policy": "fifo"}, "FifoScheduler"),
        ({"offline_policy": "conserve"}, "PreemptiveScheduler"),
        ({"offline_policy": "conserve", "safepoint_interval": 0}, "PlannedScheduler"),
    ],
)
def test_the_settings_choose_the_scheduler(values: dict[str, Any], kind: str) -> None:
    from sglang_coserve.srt.processes import scheduler_class

    server_args = SimpleNamespace(_coserve=CoserveConfig(**values))
    assert scheduler_class(server_args).__name__ == kind
