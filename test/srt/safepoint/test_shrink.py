"""The online rows of an aborted batch go on without the others: outputs stay as from stock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from srt import test_scheduler as scenarios
from srt.conftest import Reference
from srt.safepoint.random_aborts import aborts_of
from srt.safepoint.test_rollback import MODES, QUICK, SPECS, run_mixed_with_aborts, start
from srt.scripted_engine import EngineProcess, ScriptedEngine, Spec


def start_shrinking(start_engine: Any, modes: str) -> EngineProcess:
    return start(start_engine, MODES[modes], safepoint_mode="shrink")


def run(
    engine: ScriptedEngine, specs: list[Spec], seed: int
) -> tuple[dict[str, list[int]], set[str], dict[str, int], set[int]]:
    shrunk = engine.scheduler.parts.runner.safepoints.stats.shrunk
    before = dict(shrunk)
    outputs, aborted, _, layers = run_mixed_with_aborts(engine, specs, seed, 0.4)
    counts = {kind.value: n - before.get(kind, 0) for kind, n in shrunk.items()}
    return outputs, aborted, counts, layers


def check_outputs(
    process: EngineProcess, reference_outputs: Reference, *, seeds: Iterable[int], size: int
) -> None:
    """Run until enough batches of both kinds were shrunk: how many depends on the machine."""
    shrunk: Counter[str] = Counter()
    seen: set[int] = set()
    for seed in seeds:
        specs = scenarios.mixed_specs(seed=seed, num_online=size, num_offline=size)
        outputs, aborted, counts, layers = process.call(run, specs, seed)
        scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
        shrunk.update(counts)
        seen |= layers
        if min(shrunk["mixed"], shrunk["decode"]) >= size // 4:
            break
    assert min(shrunk["mixed"], shrunk["decode"]) >= size // 4
    assert seen == set(range(6))


@pytest.mark.parametrize("modes", QUICK)
def test_outputs_are_those_of_stock_whatever_leaves(
    start_engine: Any, reference_outputs: Reference, modes: str
) -> None:
    process = start_shrinking(start_engine, modes)
    check_outputs(process, reference_outputs, seeds=range(31, 40), size=8)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [1, 2])  # With 0 two tokens are a tie, to stock SGLang too.
@pytest.mark.parametrize("modes", MODES)
def test_outputs_are_those_of_stock_in_every_mode(
    start_engine: Any, reference_outputs: Reference, modes: str, seed: int
) -> None:
    process = start_shrinking(start_engine, modes)
    check_outputs(process, reference_outputs, seeds=range(seed, 100, 10), size=40)


def run_offline(engine: ScriptedEngine) -> tuple[dict[str, list[int]], int, int]:
    aborts, stats = aborts_of(engine), engine.scheduler.parts.runner.safepoints.stats
    before = sum(stats.aborts.values()), sum(stats.shrunk.values())
    aborts.start(seed=3, probability=0.5)
    try:
        engine.run([engine.request(*spec[:3], offline=True) for spec in SPECS])
    finally:
        aborts.stop()
    engine.assert_nothing_leaked()
    outputs = {spec[0]: engine.output(spec[0]) for spec in SPECS}
    return outputs, sum(stats.aborts.values()) - before[0], sum(stats.shrunk.values()) - before[1]


def test_offline_rows_alone_are_aborted(start_engine: Any, reference_outputs: Reference) -> None:
    outputs, aborts, shrunk = start_shrinking(start_engine, QUICK[0]).call(run_offline)
    assert outputs == reference_outputs(SPECS)
    assert aborts > 3
    assert shrunk == 0
