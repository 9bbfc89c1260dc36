"""The same load on a real scheduler on an emulated GPU and in the simulator: both drive the same
core by the same latency model, so that what differs is the simulator's engine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from common.own_process import OwnProcess
from interference_bench.engine import CpuClockEngine
from interference_bench.load import Load, OnlineTraffic
from interference_bench.systems import EngineSystem
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.assemble import offline_requests
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.executor_config import ExecutorConfig, SafepointConfig
from sglang_coserve.simulator.run import SimulationSetup, Workload, simulate
from sglang_coserve.srt.emulation.model_directory import make_emulated_model
from sglang_coserve.srt.emulation.settings import Emulation
from sglang_coserve.workload.trace import TraceRequest

pytestmark = pytest.mark.heavy

EMULATED = Emulation.of("llama-3.1-8b", "h100", noise=0.0)
ALONE = Load(OnlineTraffic((512, 2048), (64, 256)), rate_per_s=8.0, seconds=60.0, seed=1)
BESIDE = replace(
    ALONE, offline_prompt_tokens=2048, offline_output_tokens=128, offline_in_flight=200
)
TARGETS_MS = {"slo_ttft_ms": 300.0, "slo_tpot_ms": 40.0}
WARM_UP_S = 3.0
"""Offline requests of ``CpuClockEngine`` run so long before the first online one."""

Latencies = tuple[list[float], list[float], float]
"""TTFTs and gaps in seconds, offline tokens/s."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("emulated")
    return make_emulated_model(directory, EMULATED, vocab=2048, context=16384)


def emulated(model: Path, system: EngineSystem, load: Load) -> Latencies:
    with OwnProcess(CpuClockEngine, system, model, 0, TARGETS_MS, 0.0) as engine:
        outcome = engine.call("run", load, timeout_s=500.0)
    ttfts_s = [one.ttft_s for one in outcome.online if one.ttft_s is not None]
    gaps_s = [gap_s for one in outcome.online for gap_s in one.itls_s]
    return ttfts_s, gaps_s, outcome.offline_tokens_per_s


def simulated(load: Load, targets: SloTargets) -> Latencies:
    has_offline = load.offline_in_flight > 0
    begin_s = WARM_UP_S if has_offline else 0.0
    end_s = begin_s + load.seconds
    online = [
        TraceRequest(number, begin_s + one.at_s, len(one.prompt), one.output_tokens)
        for number, one in enumerate(load.online(2048))
    ]
    lengths = f"{load.offline_prompt_tokens}x{load.offline_output_tokens}"
    result = simulate(
        Workload(
            partial(from_trace, online, RequestClass.ONLINE),
            offline_requests(lengths if has_offline else "none", max_context_tokens=16384),
            backlog_depth=64 * has_offline,
            interval_s=end_s if has_offline else math.inf,
        ),
        SimulationSetup(
            EMULATED.latency_model(),
            ExecutorConfig(
                EMULATED.kv_tokens,
                page_tokens=1,
                max_batch_tokens=EMULATED.chunk_tokens,
                safepoint=SafepointConfig(EMULATED.num_layers),
                overlap=True,
                paced=True,
            ),
            targets,
        ),
        make_policy("coserve"),
    )
    tokens = sum(
        sum(begin_s <= at_s < end_s for at_s in one.token_times_s)
        + (begin_s <= (one.token_times_s or (0.0,))[0] < end_s) * one.prompt_tokens
        for one in result.offline
    )
    ttft_s = [one.ttft_s for one in result.online if one.ttft_s is not None]
    gaps_s = [gap_s for one in result.online for gap_s in one.itls_s]
    return ttft_s, gaps_s, tokens / load.seconds


def assert_agree(one: Latencies, other: Latencies) -> None:
    for values, others in zip(one[:2], other[:2], strict=True):
        assert len(values) == pytest.approx(len(others), abs=5)
        assert np.percentile(values, 50) == pytest.approx(np.percentile(others, 50), rel=0.10)
        assert np.percentile(values, 99) == pytest.approx(np.percentile(others, 99), rel=0.15)
    assert one[2] == pytest.approx(other[2], rel=0.05)


def test_online_requests_alone(model: Path) -> None:
    """Without offline work ours does what plain SGLang does, so that is what is simulated."""
    plain = EngineSystem(has_offline=False)
    assert_agree(simulated(ALONE, SloTargets()), emulated(model, plain, ALONE))


def test_online_requests_beside_offline_ones(model: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(EMULATED.profile))
    coserve = {"offline_policy": "coserve", "latency_profile": str(profile)}
    ours = EngineSystem(coserve=coserve, takes_slo=True)
    targets = SloTargets(*(target_ms / 1e3 for target_ms in TARGETS_MS.values()))
    assert_agree(simulated(BESIDE, targets), emulated(model, ours, BESIDE))
