"""Settings and the flags made from them."""

from __future__ import annotations

import argparse
import json
import shlex
from typing import Any

import pytest

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.control.slo import format_slo, request_targets
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets


def parse(*argv: str) -> CoserveConfig:
    parser = argparse.ArgumentParser()
    parser.add_argument("--of-somebody-else", default=1)
    CoserveConfig.add_cli_args(parser)
    return CoserveConfig.from_mapping(vars(parser.parse_args(argv)))


def test_every_field_has_a_flag_with_its_default() -> None:
    assert parse() == CoserveConfig()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slo_ttft_ms", 0),
        ("slo_ttft_ms", -1.0),
        ("slo_tpot_ms", float("nan")),
        ("slo_tpot_ms", float("inf")),
        ("slo", ("ttft p99 <= 300ms", "fast")),
        ("online_slowdown", "10"),
        ("online_slowdown", "-5%"),
        ("online_slowdown", "much"),
        ("stream_slowdown", "100"),
        ("stream_slowdown", "-5%"),
        ("stream_slowdown", "half"),
        ("offline_policy", "best"),
        ("offline_max_running", 0),
        ("offline_utility_ratio", 1.5),
        ("offline_utility_ratio", float("nan")),
        ("offline_random_picks", -1),
        ("step_prefill_tokens", 0),
        ("base_batch_requests", 0),
        ("batch_max_in_flight", 0),
        ("batch_max_in_flight_mib", 0),
        ("safepoint_interval", -1),
        ("kv_checkpoint", "always"),
        ("kv_checkpoint_host_gb", 0),
        ("kv_checkpoint_host_gb", 4.0),
        ("kv_checkpoint", "pressure"),
    ],
)
def test_a_value_out_of_range_names_the_flag(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-")):
        CoserveConfig(**{field: value})


def test_settings_are_plain_json_values() -> None:
    config = CoserveConfig(slo_ttft_ms=1, slo=("ttft p99 <= 300ms",))
    values = json.loads(json.dumps(config.to_dict()))
    assert values["slo_ttft_ms"] == 1
    assert CoserveConfig(**values) == config


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--slo 'ttft p99 <= 300ms' 'tpot mean <= 50ms'", "ttft p99 <= 300ms, tpot mean <= 50ms"),
        ("--slo 'ttft p99 <= 1s' --slo 'tpot p50 <= 5ms'", "ttft p99 <= 1000ms, tpot p50 <= 5ms"),
        ("--slo 'ttft mean <= 1ms' --slo-ttft-ms 2", "ttft p99 <= 2ms, ttft mean <= 1ms"),
        ("--slo-tpot-ms 5", "tpot p99 <= 5ms, ttft p99 <= +10%"),
        ("--online-slowdown 25%", "ttft p99 <= +25%"),
        ("", "ttft p99 <= +10%"),
        ("--offline-policy coserve", "ttft p99 <= +10%"),
        ("--offline-policy conserve", ""),
        ("--stream-slowdown 50%", "ttft p99 <= +10%"),
        (
            "--online-slowdown 25% --slo 'ttft p99 <= 1s' 'tpot mean <= +5%'",
            "ttft p99 <= 1000ms, tpot mean <= +5%, ttft p99 <= +25%",
        ),
    ],
)
def test_targets_of_all_flags_hold_at_once(argv: str, expected: str) -> None:
    """Without a TTFT target, the policy coserve bounds the slowdown of first tokens."""
    config = parse(*shlex.split(argv))
    assert ", ".join(map(format_slo, config.slos())) == expected
    assert config.offline_policy == ("conserve" if "conserve" in argv else "coserve")


@pytest.mark.parametrize(
    ("argv", "slowdown"),
    [
        ("", 1.0),
        ("--offline-policy coserve", 1.0),
        ("--stream-slowdown 50%", 0.5),
        ("--slo-ttft-ms 500", 1.0),
        ("--offline-policy conserve", None),
        ("--offline-policy conserve --stream-slowdown 50%", 0.5),
    ],
)
def test_streams_keep_half_of_their_speed_unless_told_otherwise(
    argv: str, slowdown: float | None
) -> None:
    assert parse(*shlex.split(argv)).objective().stream_slowdown == slowdown


def targets(config: CoserveConfig) -> SloTargets:
    """Those of a request without its own."""
    return request_targets([slo for slo in config.slos() if slo.limit_s is not None])


def test_requests_are_scheduled_by_the_least_target() -> None:
    slo = ("ttft p99 <= 300ms", "tpot mean <= 50ms", "tbt p99 <= 100ms")
    assert targets(CoserveConfig(slo=slo)) == SloTargets(0.3, 0.05)
    assert targets(CoserveConfig(slo=slo, slo_ttft_ms=200)) == SloTargets(0.2, 0.05)
    assert targets(CoserveConfig(slo=slo, slo_tpot_ms=80)) == SloTargets(0.3, 0.05)
    assert targets(CoserveConfig(slo_tpot_ms=80)) == SloTargets(None, 0.08)
    assert targets(CoserveConfig()) == SloTargets()
    both = CoserveConfig(online_slowdown="25%", slo=("ttft p99 <= 1s", "tpot mean <= +5%"))
    assert targets(both) == SloTargets(ttft_s=1.0)


def test_every_policy_is_one_of_the_cores() -> None:
    from sglang_coserve.config import OFFLINE_POLICIES
    from sglang_coserve.core.policies import POLICIES

    assert set(OFFLINE_POLICIES) <= set(POLICIES)


def test_the_policies_that_ignore_targets_are_baselines_of_the_simulator() -> None:
    from sglang_coserve.config import OFFLINE_POLICIES
    from sglang_coserve.simulator.run import BASELINES

    ignoring = {name for name, policy in OFFLINE_POLICIES.items() if policy.ignores_targets}
    assert ignoring == OFFLINE_POLICIES.keys() & BASELINES


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({"slo_tpot_ms": 50.0}, ""),
        ({"slo": ("tbt p99 <= +10%",)}, ""),
        ({"slo": ("tbt p99 <= 50ms",), "offline_policy": "ooco"}, ""),
        ({}, "needs a bound on the time between tokens"),
        ({"online_slowdown": "10%"}, "needs a bound on the time between tokens"),
        ({"stream_slowdown": "50%"}, "needs a bound on the time between tokens"),
        ({"slo_ttft_ms": 500.0}, "needs a bound on the time between tokens"),
        ({"slo_tpot_ms": 50.0, "offline_policy": "non_preemptive"}, "a policy that plans by it"),
        ({"slo_tpot_ms": 50.0, "kv_move_dir": None}, "--pool needs --kv-move-dir"),
        ({"slo_tpot_ms": 50.0, "pool": "lax"}, "--pool must be one of relaxed, strict"),
    ],
)
def test_a_strict_engine_has_a_bound_and_moves_kv(flags: dict[str, Any], refused: str) -> None:
    settings = {"pool": "strict", "kv_move_dir": "moved", "kv_checkpoint": "eager", **flags}
    if not refused:
        assert CoserveConfig(**settings).pool == "strict"
        return
    with pytest.raises(ConfigError, match=refused):
        CoserveConfig(**settings)
