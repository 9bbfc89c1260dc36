"""``coserve replay``: makes recorded scheduling decisions again."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_coserve.cli.console import ExitCode, say

if TYPE_CHECKING:
    from sglang_coserve.recording.events import Event
    from sglang_coserve.recording.replay import ReplayedPlan
    from sglang_coserve.recording.scheduler import SchedulerSetup

_MAX_SHOWN = 10


def replay(
    recording: Annotated[
        Path, typer.Argument(metavar="PLANS.jsonl", help="What a server's --record-plans wrote.")
    ],
    plans: Annotated[bool, typer.Option("--plans", help="Show every plan.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Only write the traffic there, as traces and a profile for coserve simulate.",
        ),
    ] = None,
) -> None:
    """Make recorded scheduling decisions again and compare.

    Every plan starts from the recorded state of the engine. To see where other settings would
    lead, --export the traffic, and run the command that it prints with them.
    Exits with 0, with 1 when a plan differs, with 2 when a file or flag cannot be used.
    """
    from sglang_coserve.errors import InputFileError
    from sglang_coserve.metrics import percentile
    from sglang_coserve.recording.file import read_recording
    from sglang_coserve.recording.replay import replay

    if export is not None:
        _export(recording, export)
        return
    num_different, planning_us = 0, list[float]()
    clock = _Stopwatch()
    try:
        with recording.open(encoding="utf-8", errors="replace") as lines:
            setup, events = read_recording(lines, str(recording))
            say(_setup_text(setup))
            for plan in replay(clock.started_at_each(events), setup.make()):
                planning_us.append(clock.elapsed_s * 1e6)
                num_different += bool(plan.differences)
                if plans or (plan.differences and num_different <= _MAX_SHOWN):
                    say(_comparison(plan))
    except OSError as error:
        raise InputFileError(f"{recording}: cannot be read: {error.strerror}") from error
    took = ""
    if planning_us:
        median_us, p99_us = (percentile(planning_us, q) for q in (50, 99))
        took = f"; planning took {median_us:.0f} µs (median), {p99_us:.0f} µs (P99)"
    say(f"{len(planning_us):,} plans, {num_different:,} differ{took}")
    if num_different:
        raise typer.Exit(ExitCode.SOME_FAILED)


def _export(recording: Path, directory: Path) -> None:
    from sglang_coserve.errors import InputFileError
    from sglang_coserve.simulator.recorded_traffic import read_traffic

    try:
        with recording.open(encoding="utf-8", errors="replace") as lines:
            traffic = read_traffic(lines, str(recording))
    except OSError as error:
        raise InputFileError(f"{recording}: cannot be read: {error.strerror}") from error
    flags = traffic.export(directory)
    say(f"as recorded:\n  {shlex.join(['coserve', 'simulate', *flags, '-o', 'recorded'])}")


class _Stopwatch:
    """Measures from when an event is handed out."""

    def __init__(self) -> None:
        self._started_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the last event was handed out."""
        return time.perf_counter() - self._started_s

    def started_at_each(self, events: Iterable[Event]) -> Iterator[Event]:
        """Hand out the events."""
        for event in events:
            self._started_s = time.perf_counter()
            yield event


def _setup_text(setup: SchedulerSetup) -> str:
    from sglang_coserve.core.control.slo import format_slo

    settings = [setup.policy, *map(format_slo, setup.slos)]
    return f"recorded: {', '.join(settings)}; {setup.profile.model} on {setup.profile.hardware}"


def _comparison(plan: ReplayedPlan) -> str:
    from sglang_coserve.recording.replay import plan_text

    head = f"#{plan.index} at {plan.snapshot.now_s:.6f} s: "
    if not plan.differences:
        return head + plan_text(plan.recorded)
    return (
        f"{head}{', '.join(plan.differences)} differ\n"
        f"  recorded: {plan_text(plan.recorded)}\n"
        f"  replayed: {plan_text(plan.replayed)}"
    )
