"""Checkpoints beside safepoints: of an aborted batch nothing is ever saved.

The engine compares what is saved with what the device has after every batch.
"""

from __future__ import annotations

from typing import Any

import pytest

from srt import test_scheduler as scenarios
from srt.conftest import Reference
from srt.kv_checkpoint.checkpoint_engine import CheckpointEngine
from srt.safepoint.random_aborts import aborts_of
from srt.scripted_engine import ScriptedEngine, Spec


@pytest.fixture(
    params=[
        pytest.param((False, 1), id="normal-page1"),
        pytest.param((True, 16), id="overlap-page16", marks=pytest.mark.heavy),
    ]
)
def engine(request: pytest.FixtureRequest, start_checkpointing: Any) -> CheckpointEngine:
    overlap, page_size = request.param
    process = start_checkpointing(
        "eager", overlap=overlap, page_size=page_size, coserve={"safepoint_interval": 1}
    )
    assert isinstance(process, CheckpointEngine)
    return process


def run_with_aborts(engine: ScriptedEngine, specs: list[Spec], seed: int) -> Any:
    aborts = aborts_of(engine)
    aborts.start(seed, probability=0.4)
    try:
        outputs, aborted, count = scenarios.run_mixed(engine, specs, seed)
    finally:
        aborts.stop()
    stats = engine.scheduler._kv.stats().to_dict()
    return outputs, aborted, sum(aborts.counts().values()), count["evicted"], stats


def test_outputs_are_those_of_stock_whatever_is_aborted(
    engine: CheckpointEngine, reference_outputs: Reference
) -> None:
    specs = scenarios.mixed_specs(seed=26, num_online=15, num_offline=25)
    outputs, aborted, aborts, evicted, stats = engine.call(run_with_aborts, specs, 3)
    scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
    assert aborts > 20
    assert evicted > 0
    assert stats["adopted_tokens"] > 0
    assert stats["demoted_tokens"] > 0
