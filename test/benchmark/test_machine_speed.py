"""Runs are made again where the machine was off its usual speed, and the best one counts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from coserve_bench import machine_speed
from coserve_bench.machine_speed import MachineSpeed, SpeedLog, measure_speed_ms

MadeRuns = Callable[[list[float], int], tuple[int, MachineSpeed, int]]
"""From speeds and repeats to the run that counts, its speed, and how many were made."""

USUAL = [10.0, 10.0, 10.0, 10.0, 10.0]


def log_of(folder: Path, measured_ms: list[float]) -> SpeedLog:
    (folder / "speed.json").write_text(json.dumps(measured_ms))
    return SpeedLog(folder / "speed.json")


@pytest.fixture
def made_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeRuns:
    """Makes runs on a machine of the given speeds."""

    def make(speeds_ms: list[float], repeats: int) -> tuple[int, MachineSpeed, int]:
        monkeypatch.setattr(machine_speed, "measure_speed_ms", iter(speeds_ms).__next__)
        made: list[int] = []

        async def run() -> int:
            made.append(len(made))
            return made[-1]

        runs = log_of(tmp_path, USUAL).run_at_usual_speed(
            run, nullcontext, tolerance=0.06, repeats=repeats
        )
        counted, speed = asyncio.run(runs)
        return counted, speed, len(made)

    return make


def test_a_run_on_the_usual_machine_is_made_once(made_runs: MadeRuns) -> None:
    counted, speed, made = made_runs([10.1, 10.5], 2)
    assert (counted, made) == (0, 1)
    assert (speed.before_ms, speed.after_ms) == (10.1, 10.5)


def test_a_slow_and_a_fast_machine_are_both_off(made_runs: MadeRuns) -> None:
    counted, _, made = made_runs([10.0, 11.0, 9.0, 10.0, 10.0, 10.2], 2)
    assert (counted, made) == (2, 3)


def test_where_the_machine_stays_off_the_closest_run_counts(made_runs: MadeRuns) -> None:
    speeds_ms = [10.0, 13.0, 10.0, 11.0, 14.0, 10.0]
    counted, speed, made = made_runs(speeds_ms, 2)
    assert (counted, speed.after_ms, made) == (1, 11.0, 3)


def test_time_that_other_guests_took_counts_as_a_slow_machine_does(tmp_path: Path) -> None:
    log = log_of(tmp_path, USUAL)
    assert log.is_usual(MachineSpeed(10.0, 10.0, stolen=0.01), 0.06)
    assert not log.is_usual(MachineSpeed(10.0, 10.0, stolen=0.1), 0.06)


def test_a_command_that_goes_on_knows_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_speed, "measure_speed_ms", iter([*USUAL, 12.0]).__next__)
    first = SpeedLog(tmp_path / "speed.json")
    assert first.usual_ms() == 10.0
    first.measure_ms()
    assert SpeedLog(tmp_path / "speed.json").measured_ms == [*USUAL, 12.0]


def test_a_measurement_takes_time_and_leaves_the_thread_its_cores() -> None:
    cores = os.sched_getaffinity(0)
    assert measure_speed_ms() > 0
    assert os.sched_getaffinity(0) == cores
