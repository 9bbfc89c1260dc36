"""Modelled machines: ``coserve simulate``, and ``coserve replay`` of what a server has decided."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from sglang_coserve.cli.console import ExitCode, say, takes
from sglang_coserve.simulator.flags import SimulationFlags
from sglang_coserve.terminal import INTERRUPTED

if TYPE_CHECKING:
    from sglang_coserve.recording.calls import ReplayedPlan, SchedulerSetup
    from sglang_coserve.simulator.find_budget import BudgetSearch
    from sglang_coserve.simulator.observer import RunControl
    from sglang_coserve.simulator.sweep import Sweep


@takes(SimulationFlags)
def simulate(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIRECTORY", help="Where the report goes.")
    ],
    flags: SimulationFlags,
    find_budget: Annotated[
        bool,
        typer.Option(
            "--find-budget",
            help="Find the largest --iteration-budget-ms with which --policy coserve or hygen"
            " meets every --slo; written to budget.json.",
        ),
    ] = False,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Show what several slowdowns of streams, targets for gaps and sizes of stock"
            " SGLang's mixed chunks bring offline work, and cost online requests; written to"
            " sweep.json.",
        ),
    ] = False,
    event_log: Annotated[
        bool, typer.Option(help="Write events-POLICY.jsonl: some 50 MB for 1,000 s.")
    ] = False,
    time_limit: Annotated[
        float,
        typer.Option(metavar="S", help="Real seconds after which to report what there is."),
    ] = math.inf,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Compare policies on a modelled machine. Every result is simulated.

    Ctrl-C and --time-limit end the run and report what was simulated so far.
    Exits with 0, with 1 when no budget meets the SLOs, with 2 when a flag or file cannot be
    used, with 130 after Ctrl-C.
    """
    from sglang_coserve.errors import ConfigError
    from sglang_coserve.simulator.compare import compare
    from sglang_coserve.simulator.observer import RunControl
    from sglang_coserve.simulator.options import SimulationOptions
    from sglang_coserve.simulator.report import table_text, write_report

    options = SimulationOptions(**vars(flags))
    if find_budget and sweep:
        raise ConfigError("--find-budget and --sweep: use one of them")
    if find_budget or sweep:
        if event_log:
            name = "--find-budget" if find_budget else "--sweep"
            raise ConfigError(f"--event-log: {name} writes no event log")
        control = RunControl(time_limit, show=not quiet)
        if find_budget:
            from sglang_coserve.simulator.find_budget import BudgetSearch

            search = BudgetSearch(options, control)
            _search(search, output / "budget.json", control)
            if search.problem is not None:
                raise typer.Exit(ExitCode.SOME_FAILED)
        else:
            from sglang_coserve.simulator.sweep import Sweep

            _search(Sweep(options, control), output / "sweep.json", control)
        return
    with RunControl(time_limit, show=not quiet) as control:
        results = compare(options, output, control, event_log=event_log)
    if results:
        write_report(results, output, options.to_dict())
        say(table_text(results), newline=False)
        say(f"report: {output / 'report.json'}")
    if control.is_interrupted:
        raise typer.Exit(INTERRUPTED)


def _search(search: BudgetSearch | Sweep, report: Path, control: RunControl) -> None:
    """Run a search of several simulations, write its report, and print it."""
    report.parent.mkdir(parents=True, exist_ok=True)
    with control:
        search.run()
    report.write_text(json.dumps(search.to_dict(), indent=2, allow_nan=False) + "\n", "utf-8")
    say(search.to_text(), newline=False)
    say(f"report: {report}")
    if control.is_interrupted:
        raise typer.Exit(INTERRUPTED)


class SeveralSlosCommand(TyperCommand):
    """A command whose ``--slo`` takes one or more values, as the server's does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the flag before each of its values, which typer can take."""
        return super().parse_args(ctx, list(_repeated("--slo", args)))


def _repeated(flag: str, args: Iterable[str]) -> Iterator[str]:
    is_open = False
    for arg in args:
        if arg.startswith("-"):
            is_open = arg == flag
            if is_open:
                continue
        elif is_open:
            yield flag
        yield arg


_MAX_SHOWN = 10


def replay(
    recording: Annotated[
        Path, typer.Argument(metavar="PLANS.jsonl", help="What a server's --record-plans wrote.")
    ],
    plans: Annotated[bool, typer.Option("--plans", help="Show every plan.")] = False,
) -> None:
    """Make recorded plans again and compare.

    Every plan starts from the recorded state of the engine.
    Exits with 0, with 1 when a plan differs, with 2 when a file or flag cannot be used.
    """
    from sglang_coserve.errors import InputFileError, unreadable
    from sglang_coserve.recording.calls import replay
    from sglang_coserve.recording.file import read_recording

    num_plans = num_different = 0
    try:
        with recording.open("rb") as lines:
            setup, steps = read_recording(lines, str(recording))
            say(_setup_text(setup))
            for plan in replay(steps, setup.make()):
                num_plans += 1
                num_different += bool(plan.differences)
                if plans or (plan.differences and num_different <= _MAX_SHOWN):
                    say(_comparison(plan))
    except OSError as error:
        raise InputFileError(unreadable(recording, error)) from error
    say(f"{num_plans:,} plans, {num_different:,} differ")
    if num_different:
        raise typer.Exit(ExitCode.SOME_FAILED)


def _setup_text(setup: SchedulerSetup) -> str:
    from sglang_coserve.core.control.slo import format_slo

    settings = [setup.policy, *map(format_slo, setup.slos)]
    return f"recorded: {', '.join(settings)}; {setup.profile.model} on {setup.profile.hardware}"


def _comparison(plan: ReplayedPlan) -> str:
    from sglang_coserve.recording.calls import plan_text, value_text

    head = f"#{plan.index} at {plan.snapshot.now_s:.6f} s: "
    if not plan.differences:
        return head + plan_text(plan.recorded)
    lines = [f"{head}{', '.join(plan.differences)} differ"]
    for name in plan.differences:
        recorded, replayed = (
            value_text(getattr(each, name)) for each in (plan.recorded, plan.replayed)
        )
        lines.append(f"  {name}: recorded {recorded}, replayed {replayed}")
    return "\n".join(lines)
