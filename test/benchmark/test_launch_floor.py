"""The least time of a pass: batches in rounds, and a probe that tells how fast the host is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from gpu.launch_floor import PROBE, figures, measure_rounds, parse, plan_floors, table
from profiler.modelled_executor import ModelledExecutor
from sglang_coserve.profiler.shapes import ExecutorLimits, StepShape

LIMITS = ExecutorLimits(
    max_batch_tokens=8192, max_request_tokens=32768, max_requests=256, kv_capacity_tokens=600_000
)


@dataclass
class SlowSpell(ModelledExecutor):
    """The host takes twice as long from the 41st to the 80th pass."""

    limits: ExecutorLimits = field(default=LIMITS)

    def run(self, shape: StepShape) -> float:
        is_slow = 40 <= len(self.runs) < 80
        seconds = super().run(shape)
        self.now_s += seconds * is_slow
        return seconds * (1 + is_slow)


def test_every_round_runs_each_batch_once_behind_a_probe() -> None:
    executor, floors = SlowSpell(), plan_floors(LIMITS)
    assert list(measure_rounds(executor, floors, rounds=3, limit_s=1e9, clock=executor.clock)) == [
        *(1, 2, 3)
    ]
    shapes = [floor.shape for floor in floors]
    a_round = [shape for floor in floors for shape in (PROBE, floor.shape)]
    assert executor.runs == [*shapes, PROBE, *a_round * 3]
    found = figures(floors)
    assert {len(row["runs"]) for row in found["batches"]} == {3}
    assert 0 < found["probe"]["fast_share"] < 1
    assert found["probe"]["most_ms"] == pytest.approx(2 * found["probe"]["least_ms"])
    (mixed,) = (row for row in found["batches"] if row["batch"] == "231 + 25, prefix")
    assert (mixed["prefix_tokens"], mixed["context_tokens"]) == (2112, 4224)
    assert mixed["fast_host_ms"] == mixed["least_ms"] < mixed["most_ms"]
    model = executor.model.predict
    decodes = StepShape(decodes=(4224,) * 25).stats
    price_s = (model(decodes.with_prefill(231, 2112)) - model(decodes)) / 231
    assert mixed["us_per_prompt_token"] == pytest.approx(1e6 * price_s)
    shown = table({**found, "attention_backend": "fa3"})
    assert "231 + 25, prefix" in shown and "Attention backend in effect: fa3." in shown


def test_no_round_begins_after_the_limit() -> None:
    executor, floors = SlowSpell(), plan_floors(LIMITS)
    assert list(measure_rounds(executor, floors, rounds=9, limit_s=0.0, clock=executor.clock)) == [
        1
    ]


def test_an_interrupted_round_keeps_its_passes() -> None:
    executor, floors = SlowSpell(), plan_floors(LIMITS)
    rounds = measure_rounds(executor, floors, rounds=9, limit_s=1e9, clock=executor.clock)
    next(rounds)
    rounds.close()
    assert figures(floors)["batches"] and not figures(plan_floors(LIMITS))["batches"]


def test_a_small_engine_has_shorter_contexts_and_fewer_batches() -> None:
    small = replace(LIMITS, max_batch_tokens=512, kv_capacity_tokens=16_384)
    floors = plan_floors(small)
    assert all(small.allow(floor.shape) for floor in floors)
    names = [floor.name for floor in floors]
    assert "487 + 25, prefix" in names and "999 + 25, prefix" not in names


@pytest.mark.parametrize(("flag", "value"), [("--rounds", "0"), ("--limit-s", "-1")])
def test_a_count_that_measures_nothing_is_refused(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--model-path", "m", "--out", "o", flag, value])
    assert f"{flag} {value}: it must be a positive number" in capsys.readouterr().err
