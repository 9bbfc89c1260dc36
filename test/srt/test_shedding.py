"""Online requests refused under overload, on the real scheduler."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import pytest

from srt.conftest import Reference
from srt.scripted_engine import EngineProcess, ScriptedEngine, Spec
from srt.test_safeguards import refusals
from srt.test_scheduler import prompt

LOOSE = {
    "offline_policy": "coserve",
    "startup_profile_seconds": 0.0,
    "slo_ttft_ms": 60_000.0,
    "slo_tpot_ms": 60_000.0,
}


@pytest.fixture(params=[(False, 1), (True, 16)], ids=["normal-page1", "overlap-page16"])
def engine(request: pytest.FixtureRequest, start_engine: Any) -> EngineProcess:
    """An engine that refuses; requests bring targets that cannot be met."""
    overlap, page_size = request.param
    coserve = {**LOOSE, "overload": "shed"}
    return start_engine(overlap=overlap, page_size=page_size, coserve=coserve)


def offline_load(engine: ScriptedEngine) -> list[Any]:
    return [engine.request(f"off{i}", prompt(90 + i, 60), 16, offline=True) for i in range(4)]


SPECS: list[Spec] = [(f"on{i}", prompt(i, 40 + 20 * i), 6, False) for i in range(6)]
LATE = ("on1", "on2", "on5")


def run_overload(engine: ScriptedEngine, num_offline: int) -> dict[str, Any]:
    """Half of the requests have a target that nobody could meet."""
    shed_before = engine.scheduler.parts.status.state()["online"]["shed"]
    requests = offline_load(engine)[:num_offline]
    for spec in SPECS:
        request = engine.request(*spec[:3])
        if spec[0] in LATE:
            request.sampling_params.custom_params = {"coserve_slo_ttft_ms": 0.001}
        requests.append(request)
    with refusals(engine) as refused:
        engine.run(requests)
    outputs = {spec[0]: engine.output(spec[0]) for spec in SPECS}
    engine.assert_nothing_leaked()
    return {
        "refused": {rid: reason["status_code"] for rid, reason in refused.items()},
        "outputs": outputs,
        "known": len(engine.scheduler.parts.requests),
        "shed": engine.scheduler.parts.status.state()["online"]["shed"] - shed_before,
        "offline": [len(engine.output(f"off{i}")) for i in range(num_offline)],
    }


@pytest.mark.parametrize("num_offline", [0, 4])
def test_only_what_can_no_longer_make_it_is_refused(
    engine: EngineProcess, reference_outputs: Reference, num_offline: int
) -> None:
    found = engine.call(run_overload, num_offline)
    assert found["refused"] == dict.fromkeys(LATE, HTTPStatus.SERVICE_UNAVAILABLE)
    assert all(isinstance(code, HTTPStatus) for code in found["refused"].values())
    served = [spec for spec in SPECS if spec[0] not in LATE]
    assert {rid: found["outputs"][rid] for rid, *_ in served} == reference_outputs(served)
    assert all(found["outputs"][rid] == [] for rid in LATE)
    assert (found["known"], found["shed"]) == (0, len(LATE))
    assert found["offline"] == [16] * num_offline
