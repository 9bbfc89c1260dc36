"""The ``coserve`` command: assembles the commands, one module each.

A module's signature is the command's; what it runs is imported when it runs, so
that ``coserve --help`` is quick and never loads torch.
"""

from __future__ import annotations

import sys

import typer

from sglang_coserve.cli import exit_codes
from sglang_coserve.cli.batches import cancel, list_batches, results, status
from sglang_coserve.cli.groups import CommandGroup, SeveralSlosCommand
from sglang_coserve.cli.jobs import jobs
from sglang_coserve.cli.make_model import make_model
from sglang_coserve.cli.profile import PROFILE_SETTINGS, profile
from sglang_coserve.cli.replay import replay
from sglang_coserve.cli.say import say
from sglang_coserve.cli.serve import PASS_THROUGH, gateway, serve
from sglang_coserve.cli.simulate import simulate
from sglang_coserve.cli.simulate_fleet import simulate_fleet
from sglang_coserve.cli.submit import submit
from sglang_coserve.cli.top import top
from sglang_coserve.cli.version import version
from sglang_coserve.errors import CoserveError

__all__ = ["app", "main"]

app = typer.Typer(
    cls=CommandGroup,
    help="Online and offline requests on one SGLang engine.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(context_settings=PASS_THROUGH)(serve)
app.command(context_settings=PASS_THROUGH)(gateway)
app.command()(submit)
app.command()(status)
app.command("list")(list_batches)
app.command()(cancel)
app.command()(results)
app.add_typer(jobs, name="jobs")
app.command()(top)
app.command(context_settings=PROFILE_SETTINGS)(profile)
app.command(cls=SeveralSlosCommand)(simulate)
app.command("simulate fleet")(simulate_fleet)
app.command()(replay)
app.command()(make_model)
app.command()(version)


def main() -> None:
    """Run the command line; the entry point of ``coserve``."""
    try:
        app()
    except CoserveError as error:
        say(f"coserve: {error}", is_error=True)
        sys.exit(exit_codes.of_error(error))
