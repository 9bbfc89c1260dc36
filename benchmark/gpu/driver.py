"""Runs as many steps as the time allows, in order of value, and goes on where it stopped."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from gpu.child import Ended, run_child
from gpu.record import Status, StepRecord, read_json
from gpu.setting import Setting
from gpu.steps import Step

__all__ = ["INCOMPLETE_EXIT", "REFUSED_EXIT", "Driver", "next_step"]

REFUSED_EXIT: Final = 4
"""Exit status of a step that cannot be measured here; ``reported.json`` says why."""

INCOMPLETE_EXIT: Final = 5
"""Exit status of a step that had too little time, and can go on."""

_BENCHMARKS: Final = Path(__file__).resolve().parent.parent
GRACE_S: Final = 45.0
"""Longer than the processes that a step starts are given by it."""

_MARGIN_S: Final = 20.0
_TAIL_LINES: Final = 40
_TRIES: Final = 3
"""Most attempts at one step in one run; only one that was partial is tried again."""

_RANKS: Final = {None: 0, Status.PARTIAL: 1, Status.REFUSED: 2, Status.FAILED: 2}


def next_step(
    steps: Sequence[Step],
    records: Mapping[str, StepRecord],
    remaining_s: float,
    excluded: Collection[str] = (),
) -> Step | None:
    """Return what to run next; None when nothing is left that fits into the time.

    First what was never tried, in order of value, then what was stopped, then what
    failed or was refused: one expensive step must not keep the others from a figure.
    """
    ranked = []
    for step in steps:
        record = records.get(step.name)
        status = record.status if record is not None else None
        is_open = status is not Status.DONE and step.name not in excluded
        if is_open and step.least_s <= remaining_s:
            ranked.append((_RANKS[status], step))
    return min(ranked, key=lambda item: item[0])[1] if ranked else None


class Driver:
    """The steps of one folder.

    A record on the disk says how each step stands, so that a later process goes on.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        out: Path,
        setting: Setting,
        *,
        command: str,
        say: Callable[[str], None],
        changed: Callable[[], None] = lambda: None,
        grace_s: float = GRACE_S,
    ) -> None:
        """``say`` is told what happens, ``changed`` called when a record was written.

        A step that is told to end has ``grace_s`` to do so.
        """
        self._grace_s = grace_s
        self._steps = steps
        self._out = out
        self._setting = setting
        self._command = command
        self._say = say
        self._changed = changed
        self._records: dict[str, StepRecord] = {}
        for step in steps:
            # A record of a dry run must not pass for a measurement, nor the other way round.
            record = StepRecord.read(self._path(step))
            if record is not None and record.dry_run == setting.dry_run:
                self._records[step.name] = record

    @property
    def records(self) -> list[StepRecord]:
        """How every step stands that was ever tried, in order of value."""
        return [self._records[s.name] for s in self._steps if s.name in self._records]

    def run(self, seconds: float) -> None:
        """Run steps for at most so long.

        Raises:
            KeyboardInterrupt: the step under way has ended and its record is written.
        """
        end_s = time.monotonic() + seconds
        tries: dict[str, int] = {}
        excluded: set[str] = set()
        while True:
            remaining_s = end_s - time.monotonic() - _MARGIN_S
            step = next_step(self._steps, self._records, remaining_s, excluded)
            if step is None:
                return
            tries[step.name] = tries.get(step.name, 0) + 1
            record = self._attempt(step, min(step.limit_s, remaining_s))
            if record.status is not Status.PARTIAL or tries[step.name] == _TRIES:
                excluded.add(step.name)

    def _attempt(self, step: Step, limit_s: float) -> StepRecord:
        folder = self._out / "work" / step.name
        log_path = self._out / "logs" / f"{step.name}.log"
        for needed in (folder, log_path.parent):
            needed.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", step.module, "--folder", str(folder)]
        command += ["--setting", str(self._out / "setting.json"), "--seconds", f"{limit_s:.0f}"]
        self._say(f"{step.name}: at most {limit_s:.0f} s")
        began_s = time.monotonic()
        ended = None
        try:
            with log_path.open("wb") as log:
                ended = run_child(
                    command, limit_s=limit_s, grace_s=self._grace_s, log=log, env=_environment()
                )
        finally:
            # Also after Ctrl-C: what was measured is kept.
            record = self._record(step, ended, time.monotonic() - began_s, log_path)
            record.write(self._path(step))
            self._records[step.name] = record
            self._say(": ".join(filter(None, (step.name, record.status.value, record.problem))))
            self._changed()
        return record

    def _record(self, step: Step, ended: Ended | None, seconds: float, log: Path) -> StepRecord:
        reported = read_json(self._out / "work" / step.name / "reported.json") or {}
        refusal = str(reported.pop("refusal", ""))
        status, problem = _judge(ended, refusal, has_figures=bool(reported.get("figures")))
        earlier = self._records.get(step.name)
        return StepRecord(
            step=step.name,
            question=step.question,
            status=status,
            attempts=1 + (earlier.attempts if earlier else 0),
            seconds=round(seconds + (earlier.seconds if earlier else 0.0), 1),
            dry_run=self._setting.dry_run,
            command=self._command,
            problem=problem,
            log_tail=_tail(log) if status is Status.FAILED else (),
            measured=reported,
        )

    def _path(self, step: Step) -> Path:
        return self._out / f"{step.name}.json"


def _judge(ended: Ended | None, refusal: str, *, has_figures: bool) -> tuple[Status, str]:
    if ended is None:
        return Status.PARTIAL, "interrupted"
    if ended.was_killed:
        return Status.FAILED, "ran past its limit and did not end when it was told to"
    if ended.was_stopped:
        problem = "stopped at its limit"
        return (Status.PARTIAL, problem) if has_figures else (Status.FAILED, problem)
    if ended.code == 0:
        return Status.DONE, ""
    if ended.code == INCOMPLETE_EXIT:
        return Status.PARTIAL, "more to measure"
    if ended.code == REFUSED_EXIT:
        return Status.REFUSED, refusal
    return Status.FAILED, f"ended with exit status {ended.code}"


def _environment() -> dict[str, str]:
    paths = [str(_BENCHMARKS), str(_BENCHMARKS.parent / "python")]
    if inherited := os.environ.get("PYTHONPATH"):
        paths.append(inherited)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _tail(path: Path) -> tuple[str, ...]:
    lines = path.read_text(errors="replace").splitlines()
    return tuple(lines[-_TAIL_LINES:])
