"""Every setting acts under every policy, or its flag is refused there."""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from typing import Any

import pytest

from core.scheduler.scenarios import MODEL, TARGETS
from sglang_coserve.config import FIELDS_WITHOUT_EFFECT, OFFLINE_POLICIES, CoserveConfig
from sglang_coserve.core.policies import POLICIES
from sglang_coserve.core.scheduler_config import Overload, SchedulerConfig
from sglang_coserve.core.step import StepPlan
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.executor_config import ExecutorConfig, SafepointConfig
from simulator.engines import engine_of, offline, online

SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "iteration_budget_ms": (20.0, {"iteration_budget_s": 0.02}),
    "offline_max_running": (2, {"max_offline_requests": 2}),
    "overload": ("shed", {"overload": Overload.SHED}),
    "stream_slowdown": ("20%", {"stream_slowdown": 0.2}),
}
"""Values by flag, each with the field of ``SchedulerConfig``. Flags neither here nor in
``OF_POLICIES`` act outside of the core."""

OF_POLICIES: dict[str, float] = {
    "offline_utility_ratio": 0.0,
    "offline_random_picks": 0,
    "step_prefill_tokens": 64,
    "base_batch_requests": 2,
}
"""Values by flag, for flags that are settings of policies."""

VALUES: dict[str, dict[str, Any]] = {
    **{name: {name: value} for name, (value, _) in SETTINGS.items()},
    **{name: {name: value} for name, value in OF_POLICIES.items()},
    "slo_ttft_ms": {"slo_ttft_ms": 100.0},
    "slo_tpot_ms": {"slo_tpot_ms": 20.0},
    "slo": {"slo": ("ttft p99 <= 300ms",)},
    "online_slowdown": {"online_slowdown": "10%"},
    "offline_objectives": {"offline_objectives": ("night",)},
    "offline_priority_below": {"offline_priority_below": 0.0},
    "latency_profile": {"latency_profile": "profile.json"},
    "startup_profile_seconds": {"startup_profile_seconds": 3.0},
    "safepoint_interval": {"safepoint_interval": 2},
    "safepoint_decode_graphs": {"safepoint_decode_graphs": True, "safepoint_interval": 2},
    "record_plans": {"record_plans": "plans.jsonl"},
    "kv_checkpoint": {"kv_checkpoint": "eager"},
    "kv_checkpoint_host_gb": {"kv_checkpoint_host_gb": 1.0, "kv_checkpoint": "lazy"},
    "kv_move_dir": {"kv_move_dir": "moved", "kv_checkpoint": "eager"},
    "pool": {"pool": "relaxed", "kv_move_dir": "moved", "kv_checkpoint": "eager"},
    "media_sources": {"media_sources": "inline"},
    "log_format": {"log_format": "json"},
    "open_view": {"open_view": True},
    "coserve_data_dir": {"coserve_data_dir": "data"},
    **{
        name: {name: 7, "coserve_data_dir": "data"}
        for name in (
            *("batch_max_upload_mib", "batch_max_lines", "batch_max_in_flight"),
            *("batch_max_active", "batch_max_active_per_key", "batch_max_stored_gib_per_key"),
            *("batch_max_files_per_key", "batch_max_in_flight_mib"),
        )
    },
    "batch_webhook_url": {"batch_webhook_url": "https://a.example", "coserve_data_dir": "data"},
}
"""By flag: a value that is not its default, with the flags that it needs."""

TIGHT = SloTargets(ttft_s=1.0, tpot_s=0.0109)
"""Not all decodes fit a step."""

FREE = SloTargets(ttft_s=1.0)
"""No limit on gaps, which would replace the pace of streams."""


@cache
def decided(
    policy: str,
    safepoint: SafepointConfig | None,
    targets: SloTargets,
    online_share: float,
    gap_s: float,
    settings: tuple[tuple[str, Any], ...],
    policy_settings: tuple[tuple[str, Any], ...] = (),
) -> list[StepPlan]:
    """What is planned while first only offline requests come, then online ones among them, one
    request every ``gap_s``. Every 10 ms they are more than can be served."""
    rng = random.Random(6)
    requests = []
    for number in range(150):
        is_online = number >= 30 and rng.random() < online_share
        arrival_s = 0.03 * min(number, 30) + gap_s * max(number - 30, 0)
        tokens = rng.randint(50, 400)
        if is_online:
            requests.append(online(f"r{number}", tokens, 20, arrival_s))
        else:
            prompt = [number % 3] * 40 + [1000 + number] * (tokens - 40)
            requests.append(offline(f"r{number}", prompt, 20, arrival_s))
    engine = engine_of(
        *requests,
        policy=policy,
        targets=targets,
        config=ExecutorConfig(
            kv_capacity_tokens=4096,
            max_running_requests=16,
            max_batch_tokens=512,
            safepoint=safepoint,
        ),
        model=MODEL,
        scheduler_config=SchedulerConfig(**dict(settings)),
        policy_settings=dict(policy_settings),
    )
    plans = []
    for _ in range(130):
        engine.step()
        plans.append(engine.last_plan)
    return plans


def acts_on(
    policy: str, settings: dict[str, Any], policy_settings: dict[str, Any] | None = None
) -> bool:
    changed = tuple(settings.items()), tuple((policy_settings or {}).items())
    return any(
        decided(policy, share, *load, *changed) != decided(policy, share, *load, ())
        for share in (None, SafepointConfig(4, 1))
        for load in ((TARGETS, 0.7, 0.01), (TIGHT, 0.3, 0.03), (FREE, 0.7, 0.01))
    )


@pytest.mark.parametrize("policy", OFFLINE_POLICIES)
@pytest.mark.parametrize("name", OF_POLICIES)
def test_a_setting_of_the_policy_acts_or_its_flag_is_refused(policy: str, name: str) -> None:
    if name in FIELDS_WITHOUT_EFFECT[policy]:
        return  # ``test_every_flag_is_taken_or_refused_by_every_policy``
    config = CoserveConfig(offline_policy=policy, **{name: OF_POLICIES[name]})
    assert list(config.policy_settings().values()) == [OF_POLICIES[name]]
    assert acts_on(policy, {}, config.policy_settings())


def test_every_setting_of_a_policy_that_a_server_offers_has_a_flag() -> None:
    for policy in OFFLINE_POLICIES:
        names = {field.name for field in dataclasses.fields(POLICIES[policy]) if field.init}
        refused = FIELDS_WITHOUT_EFFECT[policy]
        flags = {name: value for name, value in OF_POLICIES.items() if name not in refused}
        settings = CoserveConfig(offline_policy=policy, **flags).policy_settings()
        assert settings.keys() == names - {"role", "chunk_tokens"}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("policy", OFFLINE_POLICIES)
def test_a_setting_acts_or_its_flag_is_refused(policy: str, name: str) -> None:
    value, setting = SETTINGS[name]
    acts = acts_on(policy, setting)
    assert acts != (name in FIELDS_WITHOUT_EFFECT[policy])
    flags: dict[str, Any] = {"offline_policy": policy, name: value}
    if acts:
        assert getattr(CoserveConfig(**flags), name) == value
    else:
        with pytest.raises(ConfigError, match=f"has no effect with --offline-policy {policy}"):
            CoserveConfig(**flags)


@pytest.mark.parametrize("policy", OFFLINE_POLICIES)
@pytest.mark.parametrize("name", VALUES)
def test_every_flag_is_taken_or_refused_by_every_policy(policy: str, name: str) -> None:
    values = VALUES[name]
    if name in FIELDS_WITHOUT_EFFECT[policy]:
        flag = "--" + name.replace("_", "-")
        # A flag that it needs may be refused before it.
        told = "--safepoint-" if name == "safepoint_decode_graphs" else f"{flag} "
        with pytest.raises(ConfigError, match=f"{told}.*no effect with --offline-policy {policy}"):
            CoserveConfig(offline_policy=policy, **values)
    else:
        config = CoserveConfig(offline_policy=policy, **values)
        assert {name: getattr(config, name) for name in values} == values


def test_every_flag_is_among_them() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(CoserveConfig)}
    assert VALUES.keys() == fields.keys() - {"offline_policy"}
    assert all(values[name] != fields[name] for name, values in VALUES.items())


@pytest.mark.parametrize("name", [name for name, values in VALUES.items() if len(values) > 1])
def test_a_flag_is_refused_without_what_it_needs(name: str) -> None:
    alone = {name: VALUES[name][name]}
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        CoserveConfig(offline_policy="coserve", **alone)


@pytest.mark.parametrize("policy", OFFLINE_POLICIES)
def test_what_is_turned_off_may_be_said_to_be(policy: str) -> None:
    CoserveConfig(offline_policy=policy, safepoint_interval=0, startup_profile_seconds=0.0)
