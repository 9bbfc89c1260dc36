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
from typing import Any

import msgspec
import pytest

import bench_gpu
from gpu.driver import AttemptRecord, Driver, StepStatus, read_record
from gpu.launch_floor import parse as parse_floor
from gpu.llama_shape import CONFIG, write_llama_shape
from gpu.steps import (
    COLOAD_SYSTEMS,
    DEFAULT_SYSTEMS,
    GpuSetting,
    check_systems,
    make_steps,
)
from sglang_coserve.bench_serving.options import Options, parse_options
from started_processes import is_alive
from waiting import eventually

BENCHMARKS = Path(__file__).parents[2] / "benchmark"
TIMEOUT_S = 60

DRIVE = """
import json, sys
from pathlib import Path
from gpu.driver import Driver
from gpu.steps import GpuSetting, Step

out, seconds = Path(sys.argv[1]), float(sys.argv[2])

def step(name, least_s, limit_s, *asked):
    def command(setting, folder):
        code = (out.parent / f"{name}.py").read_text()
        return [sys.executable, "-c", code, str(folder)]

    return Step(
        name, "why", least_s, command, "found.json", ("found.md",), limit_s, tuple(asked), reduce
    )

def reduce(folder):
    if not (folder / "large").exists():
        return {}
    (folder / "large").unlink()
    return {"reduced": True}

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

Step = tuple[str | float, ...]
"""Its name, the least time that it is worth and its limit, in seconds, and systems asked for."""


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


def test_a_step_that_is_done_runs_again_for_other_systems(folder: Folder) -> None:
    folder.write("coload", "figures(n=attempt)")
    folder.run(("coload", 0.0, 30.0, "alone", "default"))
    folder.run(("coload", 0.0, 30.0, "alone", "default"))
    assert folder.record("coload").attempts == 1
    folder.run(("coload", 0.0, 30.0, "alone", "default", "stock-512"))
    found = folder.record("coload")
    assert (found.attempts, found.asked) == (2, ("alone", "default", "stock-512"))


def test_what_a_step_leaves_is_reduced_and_its_backend_is_told(folder: Folder) -> None:
    folder.write(
        "coload",
        """
(folder / "large").write_text("x")
(folder / "found.md").write_text("| table |")
figures(attention_backend="fa3")
sys.exit(1)
""",
    )
    folder.write("broken", "(folder / 'large').mkdir(); figures(n=1)")
    folder.run(("coload", 0.0, 30.0), ("broken", 0.0, 30.0))
    found = folder.record("coload")
    assert (found.status, found.figures["reduced"]) == (StepStatus.FAILED, True)
    assert (found.attention_backend, found.attention_backend_asked) == ("fa3", None)
    assert folder.record("broken").figures == {"n": 1}
    text = (folder.path / "out" / "gpu.md").read_text()
    assert "attention backend fa3 (SGLang's choice)" in text and "| table |" in text


def test_tables_show_steps_of_earlier_commands(tmp_path: Path) -> None:
    floor, *others = make_steps()
    record = AttemptRecord(floor.name, StepStatus.DONE, 1, 60.0, "earlier", {"gpu": "H100"})
    (tmp_path / f"{floor.name}.json").write_bytes(msgspec.json.encode(record))
    setting = GpuSetting(dry_run=False, model_path="")
    driver = Driver(others, tmp_path, setting, command="", machine={}, shown=make_steps())
    assert f"## {floor.name}: {floor.question}" in driver.markdown()


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
    steps = make_steps()
    assert len({each.name for each in steps}) == len(steps)
    for each in steps:
        command = each.command(setting, tmp_path / each.name)
        assert command[1] == "-m" or Path(command[1]).is_file()
        if command[2] == "sglang_coserve.bench_serving":
            parse_options(command[3:])
        if command[2] == "gpu.launch_floor":
            assert "--attention-backend" not in parse_floor(command[3:]).server


def coload(folder: Path, *systems: str, **setting: Any) -> Options:
    """Return what bench_serving makes of the step's command line."""
    (step,) = (each for each in make_steps(systems) if each.name == "coload")
    command = step.command(GpuSetting(dry_run=False, model_path="model", **setting), folder)
    return parse_options(command[3:])


def test_the_systems_of_the_coload_step_run_in_the_order_given(tmp_path: Path) -> None:
    mixed = "coserve --online-slowdown 50%"
    options = coload(tmp_path, "stock-1024", "alone", "targets-300-40", "default", mixed, "stock")
    assert [system.name for system in options.systems] == [
        *("alone", "stock-priority:mixed-1024", "coserve:targets-300-40", "coserve:default"),
        *("coserve:--online-slowdown 50%", "stock"),
    ]
    _, stock, fixed, *_ = options.systems
    assert stock.flags[-2:] == ("--chunked-prefill-size", "1024")
    assert fixed.flags[:3] == ("--slo", "ttft p99 <= 300ms", "tbt p99 <= 40ms")
    recordings = [
        system.flags[system.flags.index("--record-plans") + 1]
        for system in options.systems
        if system.is_ours
    ]
    assert len({*recordings}) == 3
    assert recordings[1] == str(tmp_path / "plans" / "default.jsonl")
    assert options.slo_scale == 1.2 and options.make_requests_early


def test_an_attention_backend_is_given_to_every_server_where_it_is_asked_for(
    tmp_path: Path,
) -> None:
    assert "--attention-backend" not in coload(tmp_path, "alone").server
    server = coload(tmp_path, "alone", attention_backend="flashinfer").server
    assert server[server.index("--attention-backend") + 1] == "flashinfer"
    assert server[server.index("--sampling-backend") + 1] == "pytorch"


def test_offline_requests_at_a_time_are_a_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offline = coload(tmp_path, "default", offline_concurrency=64).offline
    assert offline[offline.index("--max-concurrency") + 1] == "64"
    command = ["--out", str(tmp_path), "--model-path", "none", "--offline-concurrency", "0"]
    assert bench_gpu.main(command) == 2
    assert "--offline-concurrency 0: it must be at least 1" in capsys.readouterr().err


def test_a_profile_of_this_machine_is_given_to_ours_alone(tmp_path: Path) -> None:
    profile = tmp_path / "profile" / "profile.json"
    profile.parent.mkdir()
    profile.write_text("{}")
    stock, ours = coload(tmp_path / "coload", "stock", "default").systems
    assert "--latency-profile" in ours.flags and "--latency-profile" not in stock.flags
    assert coload(tmp_path / "coload", "stock", "default").slo_scale is None


@pytest.mark.parametrize(
    ("systems", "said"),
    [
        (["alone", "vllm"], "'vllm': known are alone, default"),
        (["alone", "stock 'x"], "No closing quotation"),
        (["default", "targets"], "'targets': its targets come from 'alone'"),
        (["stock", "default", "stock"], "'stock': the same as 'stock'"),
        (["default", "coserve"], "'coserve': the same as 'default'"),
    ],
)
def test_systems_that_cannot_run_are_said(
    systems: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--out", str(tmp_path), "--model-path", "none", "--coload-systems", *systems]
    assert bench_gpu.main(command) == 2
    assert said in capsys.readouterr().err


def test_the_default_systems_can_run_and_every_name_is_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_systems(DEFAULT_SYSTEMS)
    check_systems([*COLOAD_SYSTEMS])
    with pytest.raises(SystemExit):
        bench_gpu.parse(["--help"])
    shown = capsys.readouterr().out
    for name, system in COLOAD_SYSTEMS.items():
        assert f"{name:16} {system.meaning}" in shown


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
