"""``coserve replay``: makes recorded scheduling decisions again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_coserve.cli.console import ExitCode, say

if TYPE_CHECKING:
    from sglang_coserve.recording.calls import ReplayedPlan, SchedulerSetup

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
    from sglang_coserve.errors import InputFileError, unreadable
    from sglang_coserve.recording.calls import replay
    from sglang_coserve.recording.file import read_recording

    if export is not None:
        _export(recording, export)
        return
    num_plans = num_different = 0
    try:
        with recording.open(encoding="utf-8", errors="replace") as lines:
            setup, events = read_recording(lines, str(recording))
            say(_setup_text(setup))
            for plan in replay(events, setup.make()):
                num_plans += 1
                num_different += bool(plan.differences)
                if plans or (plan.differences and num_different <= _MAX_SHOWN):
                    say(_comparison(plan))
    except OSError as error:
        raise InputFileError(unreadable(recording, error)) from error
    say(f"{num_plans:,} plans, {num_different:,} differ")
    if num_different:
        raise typer.Exit(ExitCode.SOME_FAILED)


def _export(recording: Path, directory: Path) -> None:
    from sglang_coserve.errors import InputFileError, unreadable
    from sglang_coserve.simulator.recorded_traffic import read_traffic

    try:
        with recording.open(encoding="utf-8", errors="replace") as lines:
            traffic = read_traffic(lines, str(recording))
    except OSError as error:
        raise InputFileError(unreadable(recording, error)) from error
    flags = traffic.export(directory)
    say(f"as recorded:\n  {shlex.join(['coserve', 'simulate', *flags, '-o', 'recorded'])}")


def _setup_text(setup: SchedulerSetup) -> str:
    from sglang_coserve.core.control.slo import format_slo

    settings = [setup.policy, *map(format_slo, setup.slos)]
    return f"recorded: {', '.join(settings)}; {setup.profile.model} on {setup.profile.hardware}"


def _comparison(plan: ReplayedPlan) -> str:
    from sglang_coserve.recording.calls import plan_text

    head = f"#{plan.index} at {plan.snapshot.now_s:.6f} s: "
    if not plan.differences:
        return head + plan_text(plan.recorded)
    return (
        f"{head}{', '.join(plan.differences)} differ\n"
        f"  recorded: {plan_text(plan.recorded)}\n"
        f"  replayed: {plan_text(plan.replayed)}"
    )
