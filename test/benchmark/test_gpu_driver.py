"""The steps on a GPU: what runs in which order, and what is left when something goes wrong.

The driver runs in a process of its own, with steps that are real processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bench_gpu
from gpu.driver import AttemptRecord, StepStatus, read_record
from gpu.llama_shape import CONFIG, write_llama_shape
from gpu.steps import STEPS, GpuSetting
from sglang_coserve.bench_serving.options import parse_options
from waiting import eventually

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

Step = tuple[str, float, float]
"""Its name, the least time that it is worth, and its limit, in seconds."""


class Folder:
    """A driver's folder and its steps, whose code is written below ``STEP``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, code: str) -> None:
        (self.path / f"{name}.py").write_text(STEP + code)

    def start(self, *steps: Step) -> subprocess.Popen[str]:
        paths = (str(BENCHMARKS), os.environ.get("PYTHONPATH", ""))
        return subprocess.Popen(
            [sys.executable, "-c", DRIVE, str(self.path / "out"), "100", json.dumps(steps)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            text=True,
        )

    def run(self, *steps: Step) -> None:
        assert self.start(*steps).wait(TIMEOUT_S) == 0

    def record(self, name: str) -> AttemptRecord:
        found = read_record(self.path / "out" / f"{name}.json")
        assert found is not None
        return found

    def order(self) -> list[str]:
        return (self.path / "out" / "order").read_text().split()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_steps_run_in_order_and_one_that_fails_costs_none_of_the_others(folder: Folder) -> None:
    folder.write("first", "figures(speed=3)")
    folder.write("broken", "print('what went wrong'); sys.exit(3)")
    folder.write("last", "figures(speed=4)")
    steps = [(name, 0.0, 30.0) for name in ("first", "broken", "last")]
    folder.run(steps[0], ("large", 1000.0, 2000.0), *steps[1:])
    assert folder.order() == ["first", "broken", "last"]
    assert folder.record("last").figures == {"speed": 4}
    broken = folder.record("broken")
    assert (broken.status, broken.log_tail) == (StepStatus.FAILED, ("what went wrong",))
    assert "what went wrong" in (folder.path / "out" / "gpu.md").read_text()


def test_the_same_command_goes_on_where_it_was(folder: Folder) -> None:
    folder.write("done", "figures(n=1)")
    folder.write("flaky", "figures(n=attempt) if attempt > 1 else sys.exit(1)")
    folder.write("parts", "figures(n=attempt) if attempt > 1 else wait()")
    steps = [("done", 0.0, 30.0), ("flaky", 0.0, 30.0), ("parts", 0.0, 1.0)]
    folder.run(*steps)
    # What is unfinished goes on while there is time; what failed waits for the next run.
    assert folder.order() == ["done", "flaky", "parts", "parts"]
    folder.write("untried", "figures(n=attempt)")
    folder.run(*steps, ("untried", 0.0, 30.0))
    assert folder.order()[4:] == ["untried", "flaky"]
    assert all(folder.record(name).status is StepStatus.DONE for name, _, _ in steps)
    assert folder.record("parts").attempts == 2


def test_a_step_past_its_limit_ends_with_all_that_it_started_and_keeps_its_figures(
    folder: Folder,
) -> None:
    detached = "subprocess.Popen(['sleep', '60'], start_new_session=True).pid"
    folder.write("slow", f"if attempt == 1:\n    figures(pid={detached}); wait()\n")
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    folder.write("deaf", f"{deaf}; figures(pid={detached}); wait()")
    folder.run(("slow", 0.0, 1.5), ("deaf", 0.0, 0.5))
    # Both were stopped, and tried again while there was time.
    assert folder.order() == ["slow", "deaf", "slow", "deaf", "deaf"]
    stopped, deaf_record = folder.record("slow"), folder.record("deaf")
    assert (stopped.status, stopped.attempts) == (StepStatus.DONE, 2)
    assert deaf_record.status is StepStatus.PARTIAL
    assert not any(is_alive(each.figures["pid"]) for each in (stopped, deaf_record))


def test_ctrl_c_ends_the_step_in_order(folder: Folder) -> None:
    folder.write("slow", "figures(pid=os.getpid()); wait()")
    folder.write("next", "figures(n=1)")
    driver = folder.start(("slow", 0.0, 60.0), ("next", 0.0, 60.0))
    eventually((folder.path / "out" / "work" / "slow" / "found.json").exists)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(TIMEOUT_S) == 130
    slow = folder.record("slow")
    assert (slow.status, folder.order()) == (StepStatus.PARTIAL, ["slow"])
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


def test_a_killed_driver_leaves_no_step_running(folder: Folder) -> None:
    # Its process group is its own: only the system can tell it.
    folder.write(
        "long",
        """
(folder / "pid").write_text(str(os.getpid()))
try:
    wait()
except KeyboardInterrupt:
    figures(cleaned=True)
""",
    )
    driver = folder.start(("long", 1.0, 50.0))
    pid = folder.path / "out" / "work" / "long" / "pid"
    eventually(lambda: pid.exists() and pid.read_text() != "")
    driver.kill()
    driver.wait(TIMEOUT_S)
    eventually(lambda: not is_alive(int(pid.read_text())))
    assert json.loads((pid.parent / "found.json").read_text()) == {"cleaned": True}


def test_every_token_of_the_llama_shape_has_a_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_llama_shape(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == CONFIG["vocab_size"]
    for token in (5000, 100_000, CONFIG["vocab_size"] - 1):
        assert tokenizer.decode([token]).strip() == f"filler{token}"
    assert tokenizer.decode(tokenizer.encode("Hello, world!")) == "Hello, world!"
