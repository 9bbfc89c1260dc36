"""Settings and the flags made from them."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import ConfigError


def parse(*argv: str) -> CoserveConfig:
    parser = argparse.ArgumentParser()
    parser.add_argument("--of-somebody-else", default=1)
    CoserveConfig.add_cli_args(parser)
    return CoserveConfig.from_mapping(vars(parser.parse_args(argv)))


def test_every_field_has_a_flag_with_its_default() -> None:
    assert parse() == CoserveConfig()


def test_every_field_is_documented() -> None:
    assert all(len(field.metadata["doc"]) > 20 for field in dataclasses.fields(CoserveConfig))


def test_flags_set_fields() -> None:
    config = parse("--slo-ttft-ms", "250.5", "--offline-max-running", "8")
    assert config.slo_ttft_ms == 250.5
    assert config.offline_max_running == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slo_ttft_ms", 0),
        ("slo_ttft_ms", -1.0),
        ("slo_tpot_ms", float("nan")),
        ("slo_tpot_ms", float("inf")),
        ("offline_policy", "best"),
        ("offline_max_running", 0),
    ],
)
def test_a_value_out_of_range_names_the_flag(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-")):
        CoserveConfig(**{field: value})


def test_settings_are_plain_json_values() -> None:
    values = CoserveConfig(slo_ttft_ms=1).to_dict()
    assert values["slo_ttft_ms"] == 1
    assert CoserveConfig(**values) == CoserveConfig(slo_ttft_ms=1)


def test_every_policy_but_fifo_is_one_of_the_cores() -> None:
    from sglang_coserve.config import OFFLINE_POLICIES
    from sglang_coserve.core.policies import POLICIES

    assert set(OFFLINE_POLICIES) - {"fifo"} <= set(POLICIES)
