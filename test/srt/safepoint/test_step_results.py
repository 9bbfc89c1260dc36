"""What the core is told of suspended steps: every token once, every step once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sglang_coserve.recording.calls import RecordedStep, RecordingScheduler, Started, Updated
from srt import test_scheduler as scenarios
from srt.safepoint.modes import QUICK, start
from srt.safepoint.random_suspensions import suspensions_of
from srt.scripted_engine import ScriptedEngine, Spec


def run_and_listen(
    engine: ScriptedEngine, specs: list[Spec], seed: int
) -> tuple[list[RecordedStep], dict[str, int]]:
    """Return what the core was told, and how many tokens each online request got."""
    scheduler, stops = engine.scheduler, suspensions_of(engine)
    told: list[RecordedStep] = []
    admission = scheduler.parts.admission
    core = admission.core
    admission.core = RecordingScheduler(core, told.append)
    with stops.stopping(seed, 0.5):
        outputs, _, _ = scenarios.run_mixed(engine, specs, seed)
        admission.core = core
    online = [spec[0] for spec in specs if not spec[3]]
    return told, {rid: len(outputs[rid]) for rid in online}


@pytest.mark.parametrize("modes", QUICK)
def test_every_token_and_every_step_is_told_once(start_engine: Any, modes: str) -> None:
    process = start(start_engine, modes)
    # Offline requests that outlast the others: of passes without any the core is told nothing.
    specs = scenarios.mixed_specs(seed=5, num_online=10, num_offline=20)
    specs += [(f"last{i}", scenarios.prompt(i, 50), 300, True) for i in range(2)]
    told, num_tokens = process.call(run_and_listen, specs, 5)

    steps, results, num_resumed = [], [], 0
    tokens: Counter[str] = Counter()
    step = -1
    for recorded in told:
        for call in recorded.calls:
            if isinstance(call, Started):
                steps.append(step)
            elif isinstance(call, Updated):
                result = call.result
                if result.step is not None:
                    results.append(result.step)
                assert not (result.dropped and result.served)
                for info, token_s in result.served:
                    tokens[info.rid] += token_s is not None
        if (planned := recorded.planned) is not None:
            step = planned.plan.step
            num_resumed += planned.plan.resumes
    assert steps == sorted(set(steps))
    # Those of suspended steps come later than others.
    assert len(results) == len(set(results))
    assert {*results} <= {*steps}
    assert len(steps) - len(results) <= 2
    assert num_resumed > 10
    # A request that its client aborted may have ended before its last token was told of.
    assert all(num_tokens[rid] - tokens[rid] in (0, 1) for rid in num_tokens)
    assert sum(tokens[rid] == num_tokens[rid] for rid in num_tokens) >= 8
