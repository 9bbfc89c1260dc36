"""The steps on a GPU: what runs in which order, and what is left when something goes wrong.

The driver runs in a process of its own, with steps that are real processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import bench_gpu
from gpu.driver import AttemptRecord, StepStatus, read_record
from gpu.steps import STEPS, GpuSetting
from sglang_coserve.bench_serving.options import parse_options

BENCHMARKS = Path(__file__).parents[2] / "benchmark"
TIMEOUT_S = 60

DRIVE = """
import json, sys
from pathlib import Path
from gpu.driver import Driver
from gpu.steps import GpuSetting, Step

out, seconds = Path(sys.argv[1]), float(sys.argv[2])

def step(name, least_s, limit_s):
    def command(setting, folder):
        code = (out.parent / f"{name}.py").read_text()
        return [sys.executable, "-c", code, str(folder)]

    return Step(name, "why", least_s, command, "found.json", limit_s=limit_s)

steps = [step(*each) for each in json.loads(sys.argv[3])]
setting = GpuSetting(dry_run=False, model_path="")
driver = Driver(steps, out, setting, command="test", machine={"gpu": "none"}, grace_s=1.0)
try:
    driver.run(seconds)
except KeyboardInterrupt:
    sys.exit(130)
"""

STEP = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
attempts = folder / "attempts"
attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
attempt = len(attempts.read_text())
with (folder.parents[1] / "order").open("a") as file:
    file.write(folder.name + "\\n")

def figures(**found):
    (folder / "found.json").write_text(json.dumps(found))

def wait():
    time.sleep(60)

"""

Drive = Callable[[Sequence[tuple[str, float, float]]], "subprocess.Popen[str]"]


@pytest.fixture
def write_step(tmp_path: Path) -> Callable[[str, str], None]:
    def write(name: str, code: str) -> None:
        (tmp_path / f"{name}.py").write_text(STEP + code)

    return write


@pytest.fixture
def start(tmp_path: Path) -> Drive:
    def start(steps: Sequence[tuple[str, float, float]]) -> subprocess.Popen[str]:
        paths = (str(BENCHMARKS), os.environ.get("PYTHONPATH", ""))
        return subprocess.Popen(
            [sys.executable, "-c", DRIVE, str(tmp_path / "out"), "100", json.dumps(steps)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            text=True,
        )

    return start


def record(out: Path, name: str) -> AttemptRecord:
    found = read_record(out / "out" / f"{name}.json")
    assert found is not None
    return found


def order(out: Path) -> list[str]:
    return (out / "out" / "order").read_text().split()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_steps_run_in_order_and_one_that_fails_costs_none_of_the_others(
    tmp_path: Path, write_step: Callable[[str, str], None], start: Drive
) -> None:
    write_step("first", "figures(speed=3)")
    write_step("broken", "print('what went wrong'); sys.exit(3)")
    write_step("last", "figures(speed=4)")
    steps = [(name, 0.0, 30.0) for name in ("first", "broken", "last")]
    steps.insert(1, ("large", 1000.0, 2000.0))
    assert start(steps).wait(TIMEOUT_S) == 0
    assert order(tmp_path) == ["first", "broken", "last"]
    assert record(tmp_path, "last").figures == {"speed": 4}
    broken = record(tmp_path, "broken")
    assert (broken.status, broken.log_tail) == (StepStatus.FAILED, ("what went wrong",))
    assert "what went wrong" in (tmp_path / "out" / "gpu.md").read_text()


def test_the_same_command_goes_on_where_it_was(
    tmp_path: Path, write_step: Callable[[str, str], None], start: Drive
) -> None:
    write_step("done", "figures(n=1)")
    write_step("flaky", "figures(n=attempt) if attempt > 1 else sys.exit(1)")
    write_step("parts", "figures(n=attempt) if attempt > 1 else wait()")
    steps = [("done", 0.0, 30.0), ("flaky", 0.0, 30.0), ("parts", 0.0, 1.0)]
    assert start(steps).wait(TIMEOUT_S) == 0
    # What is unfinished goes on while there is time; what failed waits for the next run.
    assert order(tmp_path) == ["done", "flaky", "parts", "parts"]
    write_step("untried", "figures(n=attempt)")
    assert start([*steps, ("untried", 0.0, 30.0)]).wait(TIMEOUT_S) == 0
    assert order(tmp_path)[4:] == ["untried", "flaky"]
    assert all(record(tmp_path, name).status is StepStatus.DONE for name, _, _ in steps)
    assert record(tmp_path, "parts").attempts == 2


def test_a_step_past_its_limit_ends_with_all_that_it_started_and_keeps_its_figures(
    tmp_path: Path, write_step: Callable[[str, str], None], start: Drive
) -> None:
    detached = "subprocess.Popen(['sleep', '60'], start_new_session=True).pid"
    write_step("slow", f"if attempt == 1:\n    figures(pid={detached}); wait()\n")
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    write_step("deaf", f"{deaf}; figures(pid={detached}); wait()")
    assert start([("slow", 0.0, 1.5), ("deaf", 0.0, 0.5)]).wait(TIMEOUT_S) == 0
    # Both were stopped, and tried again while there was time.
    assert order(tmp_path) == ["slow", "deaf", "slow", "deaf", "deaf"]
    stopped, deaf_record = record(tmp_path, "slow"), record(tmp_path, "deaf")
    assert (stopped.status, stopped.attempts) == (StepStatus.DONE, 2)
    assert deaf_record.status is StepStatus.PARTIAL
    assert not any(is_alive(each.figures["pid"]) for each in (stopped, deaf_record))


def test_ctrl_c_ends_the_step_in_order(
    tmp_path: Path, write_step: Callable[[str, str], None], start: Drive
) -> None:
    write_step("slow", "figures(pid=os.getpid()); wait()")
    write_step("next", "figures(n=1)")
    driver = start([("slow", 0.0, 60.0), ("next", 0.0, 60.0)])
    until((tmp_path / "out" / "work" / "slow" / "found.json").exists)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(TIMEOUT_S) == 130
    slow = record(tmp_path, "slow")
    assert (slow.status, order(tmp_path)) == (StepStatus.PARTIAL, ["slow"])
    assert not is_alive(slow.figures["pid"])


def test_figures_of_another_setting_are_not_mixed_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--out", str(tmp_path), "--minutes", "0", "--model-path", "none"]
    assert bench_gpu.main(command) == 0
    assert bench_gpu.main([*command, "--dry-run-cpu"]) == 2
    assert "another dry_run" in capsys.readouterr().err


@pytest.mark.parametrize("dry_run", [True, False])
def test_every_step_runs_programs_that_are_there(tmp_path: Path, dry_run: bool) -> None:
    setting = GpuSetting(dry_run=dry_run, model_path="model")
    for each in STEPS:
        command = each.command(setting, tmp_path / each.name)
        assert command[1] == "-m" or Path(command[1]).is_file()
        if command[2] == "sglang_coserve.bench_serving":
            parse_options(command[3:])


def test_a_killed_driver_leaves_no_step_running(
    tmp_path: Path, write_step: Callable[[str, str], None], start: Drive
) -> None:
    # Its process group is its own: only the system can tell it.
    write_step(
        "long",
        """
(folder / "pid").write_text(str(os.getpid()))
try:
    wait()
except KeyboardInterrupt:
    figures(cleaned=True)
""",
    )
    driver = start([("long", 1, 50)])
    pid = tmp_path / "out" / "work" / "long" / "pid"
    until(lambda: pid.exists() and pid.read_text() != "")
    driver.kill()
    driver.wait(TIMEOUT_S)
    until(lambda: not is_alive(int(pid.read_text())))
    assert json.loads((pid.parent / "found.json").read_text()) == {"cleaned": True}
