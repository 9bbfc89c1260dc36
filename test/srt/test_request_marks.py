"""Marks in ``custom_params``: checked on arrival, read by the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.config import OFFLINE_POLICIES, CoserveConfig
from sglang_coserve.errors import RequestError
from sglang_coserve.srt.marks.request_marks import (
    check_marks,
    is_offline,
    targets_of,
    with_client_marks,
)


def req(custom_params: Any) -> Any:
    """Of SGLang's ``Req``, what is read."""
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom_params))


@pytest.mark.parametrize(
    ("custom_params", "targets"),
    [
        (None, (None, None)),
        ({}, (None, None)),
        ({"other": "x"}, (None, None)),
        ({"coserve_class": "online"}, (None, None)),
        ({"coserve_class": "offline"}, (None, None)),
        ({"coserve_class": None, "coserve_slo_ttft_ms": None}, (None, None)),
        ({"coserve_slo_ttft_ms": 250}, (0.25, None)),
        ({"coserve_class": "online", "coserve_slo_tpot_ms": 12.5}, (None, 0.0125)),
        ({"coserve_slo_ttft_ms": 1e9, "coserve_slo_tpot_ms": 1e-3}, (1e6, 1e-6)),
    ],
)
def test_good_marks_are_read(
    custom_params: Any, targets: tuple[float | None, float | None]
) -> None:
    check_marks(custom_params)
    assert targets_of(req(custom_params)) == targets
    assert is_offline(req(custom_params)) == (
        (custom_params or {}).get("coserve_class") == "offline"
    )


BAD_TIMES = [0, -1, -0.5, True, "250", [250], {}, float("nan"), float("inf"), 10**400, 2e9]
BAD_TIMES += [5e-324, 1e-310, 1e-9]


@pytest.mark.parametrize(
    ("key", "told", "others"),
    [
        ("coserve_slo_ttft_ms", "milliseconds, 0.001 to 1e", {}),
        ("coserve_slo_tpot_ms", "milliseconds, 0.001 to 1e", {}),
        ("coserve_deadline_s", "seconds", {"coserve_class": "offline"}),
    ],
)
@pytest.mark.parametrize("value", BAD_TIMES, ids=lambda value: str(value)[:9])
def test_a_bad_time_is_refused_with_what_to_use(
    key: str, told: str, others: dict[str, str], value: Any
) -> None:
    with pytest.raises(RequestError, match=f"{key} is .*: use a number of {told}"):
        check_marks({key: value, **others})


def test_an_online_request_has_no_deadline() -> None:
    with pytest.raises(RequestError, match="coserve_deadline_s is for offline requests"):
        check_marks({"coserve_deadline_s": 60})


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("offline")
keys = st.sampled_from(["coserve_class", "coserve_slo_ttft_ms", "coserve_slo_tpot_ms", "x", 1])


@given(st.dictionaries(keys, values) | values)
def test_what_passes_the_check_can_be_read(custom_params: Any) -> None:
    try:
        check_marks(custom_params)
    except RequestError:
        return
    targets = targets_of(req(custom_params))
    assert all(target is None or 1e-6 <= target <= 1e6 for target in targets)
    assert targets == (None, None) or not is_offline(req(custom_params))


@pytest.mark.parametrize("key", ["coserve_slo_ttft_ms", "coserve_slo_tpot_ms"])
@pytest.mark.parametrize("policy", OFFLINE_POLICIES)
def test_a_target_that_no_plan_looks_at_is_refused(policy: str, key: str) -> None:
    config = CoserveConfig(offline_policy=policy)
    with_client_marks({"coserve_class": "online"}, config)
    if OFFLINE_POLICIES[policy].ignores_targets:
        with pytest.raises(RequestError, match=f"{key} has no effect .* {policy}: leave it out"):
            with_client_marks({key: 50}, config)
        with_client_marks({key: 50}, CoserveConfig(offline_policy=policy, overload="shed"))
    else:
        with_client_marks({key: 50}, config)
