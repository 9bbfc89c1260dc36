"""What the core is told of aborted steps: every token once, every step once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sglang_coserve.core.recording import Event, Planned, RecordingScheduler, Started, Updated
from srt import test_scheduler as scenarios
from srt.safepoint.random_aborts import aborts_of
from srt.safepoint.test_rollback import MODES, QUICK, start
from srt.scripted_engine import ScriptedEngine, Spec


def run_and_listen(
    engine: ScriptedEngine, specs: list[Spec], seed: int
) -> tuple[list[Event], dict[str, int]]:
    """Return what the core was told, and how many tokens each online request got."""
    scheduler, aborts = engine.scheduler, aborts_of(engine)
    events: list[Event] = []
    admission = scheduler.parts.admission
    core = admission.core
    admission.core = RecordingScheduler(core, events.append)
    aborts.start(seed, 0.3)
    try:
        outputs, _, _ = scenarios.run_mixed(engine, specs, seed)
    finally:
        aborts.stop()
        admission.core = core
    online = [spec[0] for spec in specs if not spec[3]]
    return events, {rid: len(outputs[rid]) for rid in online}


@pytest.mark.parametrize("mode", ["abort", "shrink"])
@pytest.mark.parametrize("modes", QUICK)
def test_every_token_is_told_once_however_often_its_step_was_aborted(
    start_engine: Any, modes: str, mode: str
) -> None:
    process = start(start_engine, MODES[modes], safepoint_mode=mode)
    # Offline requests that outlast the others: of passes without any the core is told nothing.
    specs = scenarios.mixed_specs(seed=5, num_online=10, num_offline=20)
    specs += [(f"last{i}", scenarios.prompt(i, 50), 300, True) for i in range(2)]
    events, num_tokens = process.call(run_and_listen, specs, 5)

    steps, results, num_given_up = [], [], 0
    first_tokens: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    step = -1
    for event in events:
        if isinstance(event, Planned):
            step = event.plan.step
        elif isinstance(event, Started):
            steps.append(step)
        elif isinstance(event, Updated):
            result = event.result
            results.append(result.step)
            num_given_up += bool(result.given_up)
            assert not {served.info.rid for served in result.served} & {*result.given_up}
            for info, last_token_s, token_s in result.served:
                if token_s is not None:
                    tokens[info.rid] += 1
                    first_tokens[info.rid] += last_token_s is None
    assert steps == sorted(set(steps))
    assert results == steps[: len(results)]
    assert len(steps) - len(results) <= 2
    assert num_given_up > 10
    # A request that its client aborted may have ended before its last token was told of.
    assert all(num_tokens[rid] - tokens[rid] in (0, 1) for rid in num_tokens)
    assert sum(tokens[rid] == num_tokens[rid] for rid in num_tokens) >= 8
    assert all(count == 1 for count in first_tokens.values())
