"""Runs as many steps as the time allows, in order of value, and goes on where it stopped."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import psutil

from common.results import write_json
from gpu.steps import DRY_RUN_NOTE, GpuSetting, Step
from sglang_coserve.terminal import markdown_table

_BENCHMARKS: Final = Path(__file__).resolve().parents[1]
_GRACE_S: Final = 45.0
"""Longer than the processes that a command starts are given by it."""

_MARGIN_S: Final = 20.0
_TAIL_LINES: Final = 40
_TRIES: Final = 3
"""Most attempts at one step in one run; only one that was partial is tried again."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


class StepStatus(StrEnum):
    """How the last attempt ended."""

    DONE = "done"
    """Everything is measured; a later run skips the step."""

    PARTIAL = "partial"
    """Stopped by the time or by Ctrl-C; what it measured is kept, and it can go on."""

    FAILED = "failed"


class AttemptRecord(msgspec.Struct, frozen=True):
    """``OUT/STEP.json``."""

    step: str
    status: StepStatus
    attempts: int
    seconds: float
    """Time of all attempts together."""

    command: str
    """Command line of the run that made the last attempt."""

    machine: dict[str, Any]
    problem: str = ""
    log_tail: tuple[str, ...] = ()
    figures: dict[str, Any] = {}
    asked: tuple[str, ...] = ()
    """See ``Step.asked``."""

    attention_backend_asked: str | None = None
    """Value of SGLang's flag; None: SGLang chose."""

    attention_backend: str = ""
    """Attention backend in effect, as SGLang's engines told; empty where a step runs none."""


def read_record(path: Path) -> AttemptRecord | None:
    """Return what was written; None where there is no file."""
    return msgspec.json.decode(path.read_bytes(), type=AttemptRecord) if path.exists() else None


@dataclass
class Driver:
    """The steps of one folder; a record on the disk says how each stands."""

    steps: Sequence[Step]
    """Steps to run, in order."""

    out: Path
    setting: GpuSetting
    command: str
    machine: dict[str, Any]
    say: Callable[[str], None] = print
    """Is told what happens."""

    grace_s: float = _GRACE_S
    """Seconds between SIGINT and SIGKILL."""

    shown: Sequence[Step] = ()
    """Steps with earlier results for the tables, in order; empty: ``steps`` alone."""

    def __post_init__(self) -> None:
        self.records: dict[str, AttemptRecord] = {}
        for step in (*self.shown, *self.steps):
            if (record := read_record(self.out / f"{step.name}.json")) is not None:
                self.records[step.name] = record

    def run(self, seconds: float) -> None:
        """Run steps for at most so long.

        First what was never tried, in order of value, then what was stopped, then what failed: one
        expensive step must not keep the others from a figure.

        Raises:
            KeyboardInterrupt: the step under way has ended and its record is written.
        """
        # Orphans become our children, whatever they did to their session.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        end_s = time.monotonic() + seconds
        ranks = {None: 0, StepStatus.PARTIAL: 1, StepStatus.FAILED: 2}
        left = [step for step in self.steps if self._status(step) in ranks]
        left.sort(key=lambda step: ranks[self._status(step)])
        for _ in range(_TRIES):
            tried = []
            for step in left:
                remaining_s = end_s - time.monotonic() - _MARGIN_S
                if step.least_s <= remaining_s:
                    self._attempt(step, min(step.limit_s, remaining_s))
                    tried.append(step)
            left = [step for step in tried if self._status(step) is StepStatus.PARTIAL]

    def _status(self, step: Step) -> StepStatus | None:
        """Return how the last attempt ended; None: there was none, or it had other systems."""
        record = self.records.get(step.name)
        if record is None or (record.status is StepStatus.DONE and record.asked != step.asked):
            return None
        return record.status

    def markdown(self) -> str:
        """Return how every step stands, then the tables of each."""
        lines = ["# Steps on one GPU", ""]
        if self.setting.dry_run:
            lines += [f"**{DRY_RUN_NOTE}**", ""]
        found = [
            (step, self.records[step.name])
            for step in self.shown or self.steps
            if step.name in self.records
        ]
        cells = [
            [
                step.name,
                step.question,
                f"{record.status}: {record.problem}" if record.problem else record.status,
                str(record.attempts),
                f"{record.seconds:.0f}",
            ]
            for step, record in found
        ]
        lines.append(markdown_table(("step", "", "state", "attempts", "s"), cells))
        for step, record in found:
            device = record.machine.get("gpu") or record.machine.get("processor")
            lines += ["", f"## {step.name}: {step.question}", "", f"`{record.command}` on {device}"]
            if record.attention_backend:
                how = "as asked" if record.attention_backend_asked else "SGLang's choice"
                lines[-1] += f", attention backend {record.attention_backend} ({how})"
            for table in (self._folder(step) / name for name in step.tables):
                if table.is_file():
                    lines += ["", table.read_text().strip()]
            if record.log_tail:
                lines += ["", "```text", *record.log_tail, "```"]
        return "\n".join(lines) + "\n"

    def _folder(self, step: Step) -> Path:
        return self.out / "work" / step.name

    def _attempt(self, step: Step, limit_s: float) -> None:
        folder = self._folder(step)
        log_path = self.out / "logs" / f"{step.name}.log"
        for needed in (folder, log_path.parent):
            needed.mkdir(parents=True, exist_ok=True)
        self.say(f"{step.name}: at most {limit_s:.0f} s")
        began_s = time.monotonic()
        status, problem = StepStatus.PARTIAL, "interrupted"
        try:
            command = step.command(self.setting, folder)
            with log_path.open("wb") as log:
                code = _run(command, limit_s, self.grace_s, log)
            if code is None:
                problem = "stopped at its limit"
            elif code:
                status, problem = StepStatus.FAILED, f"ended with exit status {code}"
            else:
                status, problem = StepStatus.DONE, ""
        finally:
            # Also after Ctrl-C: what was measured is kept.
            record = self._record(step, status, problem, time.monotonic() - began_s, log_path)
            self.records[step.name] = record
            write_json(self.out / f"{step.name}.json", msgspec.to_builtins(record))
            self.say(": ".join(filter(None, (step.name, record.status, record.problem))))
            (self.out / "gpu.md").write_text(self.markdown())

    def _record(
        self, step: Step, status: StepStatus, problem: str, seconds: float, log: Path
    ) -> AttemptRecord:
        results = self._folder(step) / step.results
        figures: dict[str, Any] = json.loads(results.read_text()) if results.is_file() else {}
        figures.update(self._reduced(step))
        earlier = self.records.get(step.name)
        lines = log.read_text(errors="replace").splitlines()
        shows_log = status is StepStatus.FAILED or not step.tables
        return AttemptRecord(
            step=step.name,
            status=status,
            attempts=1 + (earlier.attempts if earlier else 0),
            seconds=round(seconds + (earlier.seconds if earlier else 0.0), 1),
            command=self.command,
            machine=self.machine,
            problem=problem,
            log_tail=tuple(lines[-_TAIL_LINES:]) if shows_log else (),
            figures=figures,
            asked=step.asked,
            attention_backend_asked=self.setting.attention_backend,
            attention_backend=figures.get("attention_backend", ""),
        )

    def _reduced(self, step: Step) -> Mapping[str, Any]:
        """Make the files of a step small; return the figures that this yields."""
        if step.reduce is None:
            return {}
        try:
            return step.reduce(self._folder(step))
        except Exception as error:
            # Time on a GPU is dear: a fault in a table costs neither the record nor the next steps.
            self.say(f"{step.name}: its files are not reduced: {error!r}")
            return {}


def _run(command: Sequence[str], limit_s: float, grace_s: float, log: IO[bytes]) -> int | None:
    """Run a command; return its exit status, None where it ran into its limit.

    At the limit it gets SIGINT, which it should answer by ending its own processes and keeping
    its results, and ``grace_s`` later SIGKILL. A KeyboardInterrupt does the same, and is raised
    again. What is left of its descendants is killed: a server that stayed would keep the GPU's
    memory. If this process is killed, the command gets SIGINT, too.
    """
    paths = [str(_BENCHMARKS), str(_BENCHMARKS.parent / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        # A terminal's Ctrl-C reaches only us, and we pass it on.
        start_new_session=True,
        preexec_fn=partial(_prctl, _PR_SET_PDEATHSIG, signal.SIGINT),
    )
    try:
        return process.wait(limit_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(grace_s)
        if isinstance(reason, KeyboardInterrupt):
            raise
        return None
    finally:
        while left := psutil.Process().children(recursive=True):
            for child in left:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(left)
        process.wait()


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
