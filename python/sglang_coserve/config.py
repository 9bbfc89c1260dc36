"""Settings of co-serving: one frozen dataclass, from which the CLI flags are made."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_coserve.errors import ConfigError

__all__ = ["OFFLINE_POLICIES", "CoserveConfig"]

OFFLINE_POLICIES = ("fifo", "coserve", "conserve", "hygen", "bros", "ooco")
"""Ways to decide when offline requests run."""


def _setting(default: Any, doc: str, **cli: Any) -> Any:
    """A field whose docstring is also the help of its flag."""
    return dataclasses.field(default=default, metadata={"doc": doc, "cli": cli})


@dataclass(frozen=True, slots=True)
class CoserveConfig:
    """Settings of co-serving; every field is a command-line flag of the same name.

    Raises:
        ConfigError: on construction, when a value is out of its range.
    """

    slo_ttft_ms: float | None = _setting(
        None,
        "Target for the time to first token of an online request, in milliseconds. "
        "Shown by /coserve/status; reports count the requests within it.",
        type=float,
        metavar="MS",
    )
    slo_tpot_ms: float | None = _setting(
        None,
        "Target for the mean time per output token (after the first) of an online request, in "
        "milliseconds. Shown by /coserve/status; reports count the requests within it.",
        type=float,
        metavar="MS",
    )
    offline_policy: str = _setting(
        "fifo",
        "When offline requests run. fifo: first come, first served, whenever no online request "
        "waits. The others (experimental) plan every iteration with a latency model, against "
        "--slo-ttft-ms and --slo-tpot-ms.",
        choices=OFFLINE_POLICIES,
    )
    offline_max_running: int | None = _setting(
        None,
        "Most offline requests that may run at once; by default bounded only by "
        "--max-running-requests and by memory.",
        type=int,
        metavar="N",
    )

    def __post_init__(self) -> None:
        for name in ("slo_ttft_ms", "slo_tpot_ms"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{_flag(name)} must be a positive number of ms, got {value}")
        if self.offline_policy not in OFFLINE_POLICIES:
            raise ConfigError(
                f"{_flag('offline_policy')} must be one of {', '.join(OFFLINE_POLICIES)}, "
                f"got {self.offline_policy!r}"
            )
        if self.offline_max_running is not None and self.offline_max_running < 1:
            raise ConfigError(
                f"{_flag('offline_max_running')} must be at least 1, got {self.offline_max_running}"
            )

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add one flag per field to ``parser``, in a group named coserve."""
        group = parser.add_argument_group(
            "coserve", "Serving online and offline requests on one engine."
        )
        for field in dataclasses.fields(CoserveConfig):
            group.add_argument(
                _flag(field.name),
                default=field.default,
                help=field.metadata["doc"],
                **field.metadata["cli"],
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> CoserveConfig:
        """Build from the entries of ``values`` that name a field; others are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return dataclasses.asdict(self)


def _flag(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")
