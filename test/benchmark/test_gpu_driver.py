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
from typing import Any

import pytest

from gpu import overview
from gpu.driver import INCOMPLETE_EXIT, REFUSED_EXIT, next_step
from gpu.record import Status, StepRecord
from gpu.setting import Setting
from gpu.steps import STEPS, Step, select

BENCHMARKS = Path(__file__).parents[2] / "benchmark"
TIMEOUT_S = 60

DRIVE = """
import json, sys
from pathlib import Path
from gpu.driver import Driver
from gpu.setting import Setting
from gpu.steps import Step

out, seconds, steps = Path(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])
setting = Setting(dry_run=True)
setting.claim(out / "setting.json")
steps = [Step(name, f"steps_{name}", "why", least, limit) for name, least, limit in steps]
driver = Driver(steps, out, setting, command="test", say=print, grace_s=1.0)
try:
    driver.run(seconds)
except KeyboardInterrupt:
    sys.exit(130)
"""

STEP = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

folder = Path(sys.argv[sys.argv.index("--folder") + 1])
attempts = folder / "attempts"
attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
attempt = len(attempts.read_text())
with (folder.parents[1] / "order").open("a") as file:
    file.write(folder.name + "\\n")

def report(**fields):
    (folder / "reported.json").write_text(json.dumps(fields))

def figures(**found):
    report(figures=found, tables=["| a |"], machine=None)

def wait():
    time.sleep(60)

"""

Drive = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def write_step(tmp_path: Path) -> Callable[[str, str], None]:
    """Writes the module of a step whose code is given."""

    def write(name: str, code: str) -> None:
        (tmp_path / f"steps_{name}.py").write_text(STEP + code)

    return write


@pytest.fixture
def start(tmp_path: Path) -> Drive:
    """Starts a driver of steps, given as (name, least, limit)."""

    def start(
        steps: Sequence[tuple[str, float, float]], seconds: float = 100
    ) -> subprocess.Popen[str]:
        (tmp_path / "out").mkdir(exist_ok=True)
        paths = (str(BENCHMARKS), str(tmp_path), os.environ.get("PYTHONPATH", ""))
        return subprocess.Popen(
            [sys.executable, "-c", DRIVE, tmp_path / "out", str(seconds), json.dumps(steps)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            text=True,
        )

    return start


def record(out: Path, name: str) -> StepRecord:
    found = StepRecord.read(out / "out" / f"{name}.json")
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


def stub(status: Status) -> StepRecord:
    return StepRecord("s", "", status, attempts=1, seconds=1.0, dry_run=True, command="")


def test_the_untried_come_first_then_the_unfinished_then_the_failed() -> None:
    steps = [Step(name, "", "", least_s=10) for name in "abcd"]
    records = {"a": stub(Status.FAILED), "b": stub(Status.PARTIAL), "c": stub(Status.DONE)}
    ran = []
    while step := next_step(steps, records, 10, ran):
        ran.append(step.name)
    assert ran == ["d", "b", "a"]


def test_a_step_that_does_not_fit_leaves_the_time_to_a_shorter_one() -> None:
    steps = [Step("long", "", "", least_s=100), Step("short", "", "", least_s=10)]
    assert [next_step(steps, {}, seconds) for seconds in (100, 99, 9)] == [*steps, None]


def test_steps_run_in_order_and_one_that_fails_costs_none_of_the_others(
    tmp_path: Path, write_step: Callable[[str, str], None], start: Drive
) -> None:
    write_step("first", "figures(speed=3)")
    write_step("broken", "print('what went wrong'); sys.exit(3)")
    write_step("refusing", f"report(refusal='no such thing'); sys.exit({REFUSED_EXIT})")
    write_step("last", "figures(speed=4)")
    steps = [(name, 0.0, 30.0) for name in ("first", "broken", "refusing", "last")]
    steps.insert(1, ("large", 1000.0, 2000.0))
    assert start(steps).wait(TIMEOUT_S) == 0
    assert order(tmp_path) == ["first", "broken", "refusing", "last"]
    assert record(tmp_path, "last").measured["figures"] == {"speed": 4}
    broken, refusing = record(tmp_path, "broken"), record(tmp_path, "refusing")
    assert (broken.status, broken.log_tail) == (Status.FAILED, ("what went wrong",))
    assert (refusing.status, refusing.problem) == (Status.REFUSED, "no such thing")
    text = overview.markdown([record(tmp_path, name) for name in ("first", "broken")])
    assert "Dry run" in text and "what went wrong" in text and "| a |" in text


def test_the_same_command_goes_on_where_it_was(
    tmp_path: Path, write_step: Callable[[str, str], None], start: Drive
) -> None:
    write_step("done", "figures(n=1)")
    write_step("flaky", "figures(n=attempt) if attempt > 1 else sys.exit(1)")
    write_step("parts", f"figures(n=attempt); sys.exit(0 if attempt == 2 else {INCOMPLETE_EXIT})")
    steps = [(name, 0.0, 30.0) for name in ("done", "flaky", "parts")]
    assert start(steps).wait(TIMEOUT_S) == 0
    # What is unfinished goes on while there is time; what failed waits for the next run.
    assert order(tmp_path) == ["done", "flaky", "parts", "parts"]
    assert start(steps).wait(TIMEOUT_S) == 0
    assert order(tmp_path)[4:] == ["flaky"]
    assert all(record(tmp_path, name).status is Status.DONE for name, _, _ in steps)
    assert record(tmp_path, "parts").attempts == 2


def test_a_step_past_its_limit_ends_with_all_that_it_started_and_keeps_its_figures(
    tmp_path: Path, write_step: Callable[[str, str], None], start: Drive
) -> None:
    detached = "subprocess.Popen(['sleep', '60'], start_new_session=True).pid"
    slow = f"if attempt == 1:\n    figures(pid={detached}); wait()\n"
    write_step("slow", slow)
    write_step("deaf", f"signal.signal(signal.SIGINT, signal.SIG_IGN); {detached}; wait()")
    assert start([("slow", 0.0, 1.5), ("deaf", 0.0, 0.5)]).wait(TIMEOUT_S) == 0
    # The first was stopped, and went on when there was time left.
    assert order(tmp_path) == ["slow", "deaf", "slow"]
    stopped, deaf = record(tmp_path, "slow"), record(tmp_path, "deaf")
    assert (stopped.status, stopped.attempts) == (Status.DONE, 2)
    assert not is_alive(stopped.measured["figures"]["pid"])
    assert deaf.status is Status.FAILED


def test_ctrl_c_ends_the_step_in_order(
    tmp_path: Path, write_step: Callable[[str, str], None], start: Drive
) -> None:
    write_step("slow", "figures(pid=os.getpid()); wait()")
    write_step("next", "figures(n=1)")
    driver = start([("slow", 0.0, 60.0), ("next", 0.0, 60.0)])
    reported = tmp_path / "out" / "work" / "slow" / "reported.json"
    until(reported.exists)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(TIMEOUT_S) == 130
    slow = record(tmp_path, "slow")
    assert (slow.status, order(tmp_path)) == (Status.PARTIAL, ["slow"])
    assert not is_alive(slow.measured["figures"]["pid"])


def test_figures_of_another_setting_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "setting.json"
    Setting(server_flags=("--tp", "2")).claim(path)
    Setting(server_flags=("--tp", "2")).claim(path)
    with pytest.raises(ValueError, match="another dry_run, server_flags"):
        Setting(dry_run=True).claim(path)


def test_every_step_has_a_module_and_names_are_checked() -> None:
    modules = [BENCHMARKS / f"{step.module.replace('.', '/')}.py" for step in STEPS]
    assert all(module.is_file() for module in modules)
    assert [step.name for step in select(["profile", "smoke"])] == ["smoke", "profile"]
    with pytest.raises(ValueError, match="nothing"):
        select(["nothing"])


def test_a_record_survives_the_disk(tmp_path: Path) -> None:
    written = stub(Status.PARTIAL)
    written.write(tmp_path / "s.json")
    fields: dict[str, Any] = json.loads((tmp_path / "s.json").read_text())
    assert StepRecord.read(tmp_path / "s.json") == written and fields["status"] == "partial"
    assert StepRecord.read(tmp_path / "none.json") is None
