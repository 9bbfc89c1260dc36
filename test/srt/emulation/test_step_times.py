"""How long an emulated device takes, and what its model directory says of it."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_coserve.core.latency_model.machine import HARDWARE
from sglang_coserve.core.latency_model.model_shape import MODELS
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import ConfigError, CoserveError, InputFileError
from sglang_coserve.srt.emulation.model import StepTimes, stats_of
from sglang_coserve.srt.emulation.model_directory import make_emulated_model, read_emulation
from sglang_coserve.srt.emulation.settings import Emulation, SlowSpells

BATCH = StepStats.of([(512, 0)], [1000] * 8)


def emulation(**options: Any) -> Emulation:
    return Emulation.of("llama-3.1-8b", "h100", **{"noise": 0.0, **options})


def seconds_of(count: int = 1, **options: Any) -> list[float]:
    times = StepTimes(emulation(**options))
    return [times.seconds(BATCH, float(number)) for number in range(count)]


def test_without_more_a_step_takes_what_the_model_predicts() -> None:
    assert seconds_of() == [emulation().latency_model().predict(BATCH)]


def test_noise_varies_around_it_and_repeats() -> None:
    noisy = seconds_of(500, noise=0.1)
    predicted = seconds_of()[0]
    assert statistics.mean(noisy) == pytest.approx(predicted, rel=0.02)
    assert statistics.stdev(noisy) / predicted == pytest.approx(0.1, rel=0.15)
    assert noisy == seconds_of(500, noise=0.1)
    assert noisy != seconds_of(500, noise=0.1, seed=1)


def test_an_error_of_the_model_is_the_same_for_batches_of_about_the_same_sizes() -> None:
    times = StepTimes(emulation(model_error=0.2))
    predict = emulation().latency_model().predict

    def error(batch: StepStats) -> float:
        return times.seconds(batch, 0.0) / predict(batch)

    same = error(StepStats.of([], [1000] * 8))
    assert same == pytest.approx(error(StepStats.of([], [1001] * 8)))
    assert same != pytest.approx(error(StepStats.of([], [1000] * 20)))


def test_slow_spells_come_and_go() -> None:
    slow = seconds_of(2000, slow_spells=SlowSpells(every_s=50.0, last_s=10.0, factor=3.0))
    usual = seconds_of()[0]
    factors = [round(one / usual, 6) for one in slow]
    assert set(factors) == {1.0, 3.0}
    assert factors.count(3.0) / len(factors) == pytest.approx(10 / 60, rel=0.5)


def test_decodes_of_a_mixed_batch_are_told_by_one_token_after_a_prefix() -> None:
    batch = SimpleNamespace(
        forward_mode=ForwardMode.MIXED,
        extend_seq_lens_cpu=[128, 1, 1, 1],
        extend_prefix_lens_cpu=[64, 0, 300, 20],
    )
    assert stats_of(batch) == StepStats.of([(128, 64), (1, 0)], [300, 20])


def test_every_known_model_runs_on_devices_that_hold_it() -> None:
    for model in MODELS:
        for hardware in HARDWARE:
            one = Emulation.of(model, hardware, tp_size=8 if MODELS[model].num_kv_heads > 4 else 4)
            assert one.kv_tokens > 10_000
            assert one.copy_s_per_token < 1e-3


def test_it_is_read_as_it_was_written() -> None:
    one = emulation(tp_size=2, slow_spells=SlowSpells.parse("60:2:3"), seed=3)
    assert Emulation.from_mapping(json.loads(json.dumps(asdict(one))), "here") == one
    assert one.name == "emulated-llama-3.1-8b-2xh100"


def test_copies_take_twice_as_long_over_the_older_bus() -> None:
    times_s = {n: Emulation.of("llama-3.1-8b", n).copy_s_per_token for n in ("a40", "a100", "h100")}
    assert times_s["a40"] == times_s["a100"] == 2 * times_s["h100"]


def test_a_device_with_more_memory_computes_in_larger_chunks() -> None:
    expected = {"a40": 4096, "ascend-910c": 8192, "h100": 8192, "b200": 16384}
    chunks = {name: Emulation.of("llama-3.1-8b", name).chunk_tokens for name in expected}
    assert chunks == expected


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Emulation.of("llama-9", "h100"), "unknown model 'llama-9'"),
        (lambda: Emulation.of("llama-3.1-8b", "h900"), "'h900': use one of"),
        (lambda: Emulation.of("llama-3.1-70b", "h100"), "do not fit"),
        (lambda: emulation(noise=-0.1), "noise must be from 0 to below 1, got -0.1"),
        (lambda: emulation(prefill_launch_s=-1.0), "prefill_launch_s must be at least 0"),
        (lambda: SlowSpells.parse("often"), "EVERY_S:LAST_S:FACTOR"),
        (lambda: SlowSpells.parse("1:1:0.5"), "a factor of at least 1"),
        *(
            (partial(SlowSpells.parse, text), "a factor of at least 1")
            for text in ("inf:2:3", "nan:2:3", "60:inf:3", "60:2:inf")
        ),
        (lambda: make_emulated_model(Path("none"), emulation(), vocab=512, context=0), "context"),
    ],
)
def test_what_cannot_be_emulated_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_malformed_file_is_named() -> None:
    values = {**asdict(emulation()), "noise": "loud"}
    with pytest.raises(InputFileError, match="somewhere: noise: "):
        Emulation.from_mapping(values, "somewhere")
    del values["noise"], values["model"]
    with pytest.raises(CoserveError, match="somewhere: model: this field is missing"):
        Emulation.from_mapping(values, "somewhere")


def test_nothing_of_it_is_looked_for_in_another_model(small_model: Path) -> None:
    assert read_emulation(small_model) is None
    assert read_emulation(small_model / "nowhere") is None
