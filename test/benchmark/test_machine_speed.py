"""Runs are made again where the machine was off its usual speed, and the best one counts."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from coserve_bench import machine_speed
from coserve_bench.machine_speed import MachineSpeed, SpeedLog, SpeedLogs, measure_speed_ms

USUAL = [10.0, 10.0, 10.0, 10.0, 10.0]


def made_runs(
    monkeypatch: pytest.MonkeyPatch, speeds_ms: list[float], repeats: int
) -> tuple[int, MachineSpeed, int]:
    """Return the number of the run that counts, its speed, and how many there were."""
    monkeypatch.setattr(machine_speed, "measure_speed_ms", iter(speeds_ms).__next__)
    made: list[int] = []

    async def run() -> int:
        made.append(len(made))
        return made[-1]

    log = SpeedLog(list(USUAL), lambda: None)
    counted, speed = asyncio.run(log.run_at_usual_speed(run, tolerance=0.06, repeats=repeats))
    return counted, speed, len(made)


def test_a_run_on_the_usual_machine_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, speed, made = made_runs(monkeypatch, [10.1, 10.5], repeats=2)
    assert (counted, made) == (0, 1)
    assert (speed.before_ms, speed.after_ms) == (10.1, 10.5)


def test_a_slow_and_a_fast_machine_are_both_off(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, _, made = made_runs(monkeypatch, [10.0, 11.0, 9.0, 10.0, 10.0, 10.2], repeats=2)
    assert (counted, made) == (2, 3)


def test_where_the_machine_stays_off_the_closest_run_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speeds_ms = [10.0, 13.0, 10.0, 11.0, 14.0, 10.0]
    counted, speed, made = made_runs(monkeypatch, speeds_ms, repeats=2)
    assert (counted, speed.after_ms, made) == (1, 11.0, 3)


def test_time_that_other_guests_took_counts_as_a_slow_machine_does() -> None:
    log = SpeedLog(list(USUAL), lambda: None)
    assert log.is_usual(MachineSpeed(10.0, 10.0, stolen=0.01), 0.06)
    assert not log.is_usual(MachineSpeed(10.0, 10.0, stolen=0.1), 0.06)


def test_a_command_that_goes_on_knows_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_speed, "measure_speed_ms", iter([*USUAL, 12.0]).__next__)
    first = SpeedLogs(tmp_path / "speed.json")
    assert first.beside("ours").usual_ms() == 10.0
    first.beside("ours").measure_ms()
    again = SpeedLogs(tmp_path / "speed.json")
    assert again.beside("ours").measured_ms == [*USUAL, 12.0]
    assert again.to_dict() == {"ours": {"median_ms": 10.0, "low_ms": 10.0, "high_ms": 12.0, "n": 6}}
    assert again.beside("stock").measured_ms == []


def test_a_measurement_takes_time_and_leaves_the_thread_its_cores() -> None:
    cores = os.sched_getaffinity(0)
    assert measure_speed_ms() > 0
    assert os.sched_getaffinity(0) == cores
